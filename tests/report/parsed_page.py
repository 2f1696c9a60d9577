"""A page of a report as its tags and text."""

from html.parser import HTMLParser

VOID = {"meta", "wbr", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Headings, tags with their attributes, and whether every tag that opens is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
