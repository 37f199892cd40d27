"""Hooks of the documentation site: pages from outside docs/, and links that lead there.

The pages of docs/ link to other files of the repository, as its readers need it. On the site these
become pages (results, changelog), or copies of the file to look at.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import selectconv

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Files outside docs/ that are pages of the site.
PAGES = {
    "results/README.md": "results.md",
    "results/SCREENING.md": "screening.md",
    "results/PROTOCOL.md": "protocol.md",
    "benchmarks/SPEED.md": "speed_tables.md",
    "soak/ARCHITECTURES.md": "architectures.md",
    "soak/CAMPAIGNS.md": "campaigns.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
SHOWN = {".svg", ".html", ".ipynb"}  # copied with their own names
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside, the reference, and copies of the files that pages link to."""
    for source, name in PAGES.items():
        if name != "index.md":
            text = rewrite((ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent)
            files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference.md", content=write_reference()))
    pages = [DOCS / file.src_uri for file in files.documentation_pages() if not file.generated_by]
    pages += [ROOT / source for source in PAGES if PAGES[source] != "index.md"]
    for page in pages:
        for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = Path(os.path.normpath(page.parent / target))
            name = copy_name(path)
            if name is not None and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site's own pages and copies."""
    return markdown if page.file.generated_by else rewrite(markdown, DOCS)


def on_post_page(output: str, **_: Any) -> str:
    """Let search work from a folder with a script of ours; the theme's comes from the network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "site_worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page of what is not found."""
    return on_post_page(output_content)


def rewrite(markdown: str, folder: Path) -> str:
    """Return a page of a folder with links that are right on the site; code stays as it is."""

    def point(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if ":" in target:
            return link[0]
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(DOCS):
            return f"]({path.relative_to(DOCS).as_posix()}{anchor})"
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"]({PAGES[inside]}{anchor})"
        name = copy_name(path)
        return f"]({name})" if name is not None else "](source/index.md)"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(point, part) for part in parts[::2]]
    # A link to a folder, which the site does not have, becomes its text.
    return re.sub(r"\[([^\]\n]*)\]\(source/index\.md\)", r"\1", "".join(parts))


def copy_name(path: Path) -> str | None:
    """Return where the site has a copy of a file from outside docs/; None: it has none."""
    if not path.is_file() or path.is_relative_to(DOCS):
        return None
    inside = path.relative_to(ROOT).as_posix()
    end = "" if path.suffix in SHOWN else ".txt"  # others would be downloaded
    return None if inside in PAGES else f"source/{inside}{end}"


def write_reference() -> str:
    """Return the page of docstrings: every public name, with those of `functional`."""
    lines = [
        "# Docstrings",
        "",
        "`import selectconv as sc`. What each name is for: [every public name](api.md).",
        "",
    ]
    lines += ["## Names of `sc`", ""]
    for name, home in sorted(selectconv._HOMES.items(), key=lambda pair: pair[0].lower()):
        lines += [f"::: {home}.{name}", ""]
        if name.startswith("SelectConv") and name.endswith("d"):
            lines[-1:] = ["    options:", "      inherited_members: true", ""]
    lines += ["## Formulas: `sc.functional`", "", "::: selectconv.functional", "    options:",
              "      show_root_heading: false", "      members: true", ""]  # fmt: skip
    return "\n".join(lines)
