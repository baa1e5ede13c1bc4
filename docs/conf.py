"""Configuration of the site, which `make docs` builds: Sphinx with MyST and Furo.

Sources are the markdown files where they lie, the root of the repository being the source folder. So a link that works
in the checkout or on a forge works on the site.
"""

from pathlib import Path

from sphinx.addnodes import pending_xref

project = "titan_exp"
html_title = "titan_exp"
extensions = ["myst_parser", "sphinx.ext.autodoc"]

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "benchmarks/log/README.md",
    "docs/*.md",
    "docs/*/*.md",
    "docs/examples/*/README.md",
    "titan_exp/extensions/*/guides/*.md",
]
# Folders of no pages, which Sphinx would walk through.
exclude_patterns = [".*", "build", "runs", "outputs", "stores", "wandb", "tests", "conf"]

myst_heading_anchors = 4
myst_links_external_new_tab = True
highlight_language = "none"
# Names of torch and Python in signatures: their sites would be asked over the network.
nitpick_ignore_regex = [("py:.*", ".*")]
# Docstrings name code in single backticks.
default_role = "literal"
autodoc_default_options = {"exclude-members": "__new__, __init__"}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
add_module_names = False
autodoc_typehints_format = "short"

html_theme = "furo"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def link_folders(app, doctree):
    """Lead a link to a folder of the checkout to its README, as a forge does."""
    for node in doctree.findall(pending_xref):
        if node["reftype"] == "myst" and node["refdomain"] is None:
            folder = Path(app.env.doc2path(node["refdoc"])).parent / node["reftarget"]
            readme = app.env.path2doc(folder.resolve() / "README.md")
            if readme in app.env.found_docs:
                node.attributes |= {"refdomain": "doc", "reftarget": readme, "reftargetid": None}


def setup(app):
    """Connect what this file adds to Sphinx."""
    app.connect("doctree-read", link_folders)
