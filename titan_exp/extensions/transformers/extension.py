"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.transformers"

EXTENSION = Extension(
    name="transformers",
    summary="Any causal language model of transformers, from the config.json of a folder (model=huggingface).",
    families={"huggingface": f"{HERE}.huggingface"},
    resolvers={
        "repository_config": f"{HERE}.repository:repository_config",
        "config_size": f"{HERE}.repository:config_size",
    },
)
