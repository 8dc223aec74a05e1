"""Hooks of MkDocs: links out of docs/ work as on GitHub, and the reference has all public names.

MkDocs knows only files in docs/. So the site also gets each file of the repository that a page
links to, and links are rewritten to where the site has it. Links to absolute URLs would need no
hook, but images would then come from elsewhere, a build would not check them, and a fork or a
branch would link to another version. A notebook becomes a page, and a file to download.
"""

import json
import logging
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks")  # a warning fails a strict build
SEARCH_BOOST = {"docs/how-to.md": 4, "bench/": 0.25}  # answers first, what was tried last
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def site_path(path: str) -> str:
    """Return where the site has a file of the repository; docs/index.md is its first page."""
    if path.endswith(".ipynb"):
        return path.removesuffix("ipynb") + "md"
    return "overview.md" if path == "README.md" else path.removeprefix("docs/")


def target(page: str, link: str) -> str:
    """Return the path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def markdown_of(notebook: str) -> str:
    """Return a notebook's cells as Markdown, with its code in fences."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{x}\n```" if kind == "code" else x for kind, x in cells)


def on_files(files, config):
    from mkdocs.structure.files import File  # the tests import this module without MkDocs

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for page in pages:  # grows
        for _, link, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = target(page, link)
            if (ROOT / path).is_file() and site_path(path) not in files.src_uris:
                names = [site_path(path), *[path] * path.endswith(".ipynb")]
                for name in names:
                    files.append(File.generated(config, name, abs_src_path=ROOT / path))
                pages += [path] * path.endswith((".md", ".ipynb"))
    return files


def on_page_markdown(markdown, page, config, files):
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri)
    for start, boost in SEARCH_BOOST.items():
        if source.startswith(start):
            page.meta["search"] = {"boost": boost}
    download = ""
    if source.endswith(".ipynb"):
        markdown = markdown_of(markdown)
        download = f"\n\n[This page as a notebook]({posixpath.basename(source)})\n"

    def rewritten(match):
        text, link, anchor = match.groups(default="")
        path = target(source, link)
        if (ROOT / path).is_dir():
            return text  # the site has no page of a folder
        if not (ROOT / path).exists():
            return match[0]
        return f"[{text}]({posixpath.relpath(site_path(path), folder)}{anchor})"

    return LINK.sub(rewritten, markdown) + download


def on_page_content(html, page, config, files):
    """Warn of public names that mkdocstrings leaves out: those without a docstring."""
    if not page.file.src_uri.startswith("reference/"):
        return
    module = page.file.name
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    public = re.search(r"__all__ = \[(.*?)\]", source.read_text(encoding="utf-8"), re.DOTALL)
    for name in re.findall(r'"(\w+)"', public[1]):
        if f'id="{module}.{name}"' not in html:
            LOG.warning("%s.%s is not in the reference: it has no docstring", module, name)
