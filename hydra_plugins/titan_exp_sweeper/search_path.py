"""Hydra's search path with the option files of extensions. Imported at each start, so it imports little."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ExtensionSearchPath(SearchPathPlugin):
    """Appends the folders of extensions where the configuration is titan_exp's own, not another application's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders, behind the core's, whose options win."""
        from titan_exp.config.extension import CONF_DIR, shipped_folders

        if any(str(element.path).removeprefix("file://") == str(CONF_DIR) for element in search_path.get_path()):
            for folder in shipped_folders()[1:]:
                search_path.append("titan_exp", f"file://{folder}")
