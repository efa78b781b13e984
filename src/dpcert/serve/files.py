"""The files of the page, as a server or a static demo serves them."""

from importlib import resources

TYPES = {".html", ".css", ".js", ".svg"}


def page_files() -> dict[str, bytes]:
    """Return the page by relative URL: "index.html", and everything else below "page/". The theme is the report's."""
    folder = resources.files(__package__) / "page"
    files = {f"page/{file.name}": file.read_bytes() for file in folder.iterdir() if _suffix(file.name) in TYPES}
    files["page/theme.css"] = (resources.files("dpcert.report") / "theme.css").read_bytes()
    return {"index.html": files.pop("page/index.html"), **dict(sorted(files.items()))}


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
