"""The page of the server in a browser: a chat, and the map of the pool."""

import itertools
import json
import math
import re

import pytest

sync_api = pytest.importorskip("playwright.sync_api")


def send(page, text, **settings):
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page):
    sync_api.expect(page.locator("#send")).to_be_visible(timeout=60_000)
    return page.locator(".message.assistant").all_text_contents()


# The colours of the cells of the map by rows, each as [r, g, b, alpha] at its top and its bottom.
CELLS = """() => {
  const map = document.getElementById("map");
  const { width, height } = map;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(map, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const pixel = (x, y) => [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 4)];
  const runs = (length, at) => {
    const found = [];
    for (let i = 0; i < length; i += 1) {
      if (at(i)[3] && !(i && at(i - 1)[3])) found.push([i, i]);
      if (at(i)[3]) found.at(-1)[1] = i;
    }
    return found;
  };
  return runs(height, (y) => pixel(0, y)).map(([top, bottom]) =>
    runs(width, (x) => pixel(x, bottom)).map(([x]) => [pixel(x, top), pixel(x, bottom)]));
}"""


def cells_of(page):
    """The colours of all cells, which are the same all over."""
    cells = [cell for row in page.evaluate(CELLS) for cell in row]
    assert all(top == bottom and bottom[3] == 255 for top, bottom in cells)
    return [tuple(bottom[:3]) for _, bottom in cells]


def swatch(page, selector):
    style = f"getComputedStyle(document.querySelector({selector!r}), '::before').backgroundColor"
    return tuple(map(int, re.findall(r"\d+", page.evaluate(style))))


def are_apart(colours):
    return all(math.dist(a, b) > 50 for a, b in itertools.combinations(colours, 2))


def show_pool(page, runs, *, pages_per_cell=1, num_tokens=None, replicas=1, **counts):
    """Let the page draw a pool; these are its runs and counts in each replica."""
    counts = dict(used=0, shared=0, cached=0, free=0) | counts
    replica = {"runs": runs, "num_tokens": num_tokens or {}, "counts": counts}
    replica["num_pages"] = sum(counts.values())
    body = {"page_size": 16, "pages_per_cell": pages_per_cell, "replicas": [replica] * replicas}
    page.route("**/pool", lambda route: route.fulfill(body=json.dumps(body)))
    text = f"{replica['num_pages'] * replicas} pages"
    sync_api.expect(page.locator("#scale")).to_contain_text(text)
