import latex2mathml.converter

project, language, author = "작은 GPU, 큰 모델", "ko", "the gpu-memory-course authors"
html_title = project
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme, html_favicon = "furo", "icon.svg"
html_show_copyright = html_show_sphinx = html_show_sourcelink = html_copy_source = False
html_math_renderer = "mathml"
html_static_path, html_css_files, templates_path = ["static"], ["course.css"], ["templates"]
html_js_files = [(name, {"defer": "defer"}) for name in ("live.js", "answers.js")]


def _write(display):
    from docutils.nodes import SkipNode

    def visit(self, node):
        formula = latex2mathml.converter.convert(node.astext(), display=display)
        # Room above and below: where it scrolls, what is taller than a line would be cut off.
        style = "overflow-x: auto; padding: 0.8em 0"
        self.body.append(formula if display == "inline" else f'<div style="{style}">{formula}</div>')
        raise SkipNode

    return visit


def setup(app):
    # The browser's own mathematics: a script would have to be fetched.
    app.add_html_math_renderer("mathml", (_write("inline"), None), (_write("block"), None))
