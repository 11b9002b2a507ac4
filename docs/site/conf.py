"""Settings of the documentation site, which `.ci/site` builds with Sphinx from the Markdown of the repository."""

project = "Ostinato"
extensions = ["myst_parser"]
root_doc = "docs/site/index"
html_theme = "furo"
html_title = "Ostinato"
html_copy_source = False
myst_heading_anchors = 4  # links to headings are checked, with the anchors that GitHub gives them
suppress_warnings = [
    "misc.highlighting_failure",  # README's picture is shown as the text of its diagram
    "toc.not_included",  # decisions and lab log are for contributors: CONTRIBUTING.md links them
]
