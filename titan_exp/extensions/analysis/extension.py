"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.analysis"

EXTENSION = Extension(
    name="analysis",
    summary="What experts learned, loss by position, coordinate checks and rounding errors of recipes.",
    verbs={"doctor --numerics": f"{HERE}.verbs:numerics", "doctor --coordinates": f"{HERE}.verbs:coordinates"},
    observations={"experts": f"{HERE}.experts:Experts", "positions": f"{HERE}.loss_by_position:Positions"},
    reports={"experts": f"{HERE}.verbs:report_experts"},
)
