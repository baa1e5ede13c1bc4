"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.diffusion"

EXTENSION = Extension(
    name="diffusion",
    summary="Diffusion models (FLUX.1), and encoding of images for their training.",
    families={"flux": f"{HERE}.flux"},
    verbs={"encode": f"{HERE}.verbs:encode"},
    options={"encode": f"{HERE}.verbs:EncodeOptions"},
)
