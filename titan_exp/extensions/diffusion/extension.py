"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.diffusion"

EXTENSION = Extension(
    name="diffusion",
    summary="Diffusion models (FLUX.1), and encoding of images for their training.",
    groups={"data": f"{HERE}.config:ImageData", "tracking": f"{HERE}.config:ImageTracking"},
    rules=f"{HERE}.rules",
    families={"flux": f"{HERE}.flux"},
    objectives={"rectified_flow": f"{HERE}.rectified_flow:RectifiedFlow"},
    sources={"images": f"{HERE}.images_source", "latents": f"{HERE}.latents"},
    asked=f"{HERE}.config:asked",
    parts={"images": f"{HERE}.training_images:parts"},
    generators={"images": f"{HERE}.generate_images:Images"},
    metrics=("validation_text_gain",),
    verbs={"encode": f"{HERE}.verbs:encode"},
    options={"encode": f"{HERE}.config:EncodeOptions", "generate": f"{HERE}.config:DrawOptions"},
    usage={
        "generate": """
               titan-exp generate runs/flux_laptop/0d5f6c8e2a91 prompt="blue heart" prompt="red apple" guidance=3""",
        "evaluate": "  The loss of a diffusion model is that at eight fixed times, with and without its texts.\n",
    },
)
