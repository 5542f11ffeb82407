"""The page of a report, in a browser: what one sees, finds and clicks."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("igraph")
pytest.importorskip("pygments")

from report_browser import browser, missing, opened

from codegen.target import target
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.origins import calling_line, written_for
from fusegraph.plan import plan
from fusegraph.report.page.facts import facts_of
from fusegraph.report.page.file import load, save, write
from fusegraph.report.page.times import with_times

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
H200 = target("h200")
ROOT = Path(__file__).parents[1]


def layers(count: int, name: str = "layers") -> Graph:
    """Returns a graph of ``count`` layers of two products and five pointwise nodes, with a residual."""
    graph = Graph(name, io_dtype="float16")
    x = graph.tensor("x", (64, 64))
    for number in range(count):
        hidden = graph.gelu(x @ graph.tensor(f"up{number}", (64, 64)), name=f"gelu {number}") * 0.5
        x = x + graph.relu(hidden @ graph.tensor(f"down{number}", (64, 64)), name=f"relu {number}")
    graph.output(x, name="y")
    return graph


def written(graph: Graph, folder: Path) -> Path:
    facts = facts_of([plan(graph, Options(target=H200))], H200, title=graph.name)
    return save(facts, folder / f"{graph.name}.html")


@pytest.fixture(scope="module")
def driver() -> Any:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with written_for(calling_line):
        graph = layers(3, "three")
    return written(graph, tmp_path_factory.mktemp("pages"))


@pytest.fixture
def page(driver: Any, small: Path) -> Any:
    opened(driver, small)
    yield driver
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def click(driver: Any, selector: str) -> None:
    driver.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))", selector
    )


def text(driver: Any, selector: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def find(driver: Any, words: str) -> None:
    """Types into the search, and takes the first result."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver.find_element(By.TAG_NAME, "body").send_keys("/")
    driver.switch_to.active_element.send_keys(words, Keys.ENTER)


@pytest.mark.slow
def test_a_page_asks_nothing_of_the_network(page):
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert "three" in page.title


def test_search_finds_a_node_and_shows_its_source(page):
    find(page, "gelu 1")
    details = text(page, "#details")
    assert "gelu 1" in details
    assert "test_report_page.py" in details  # the line that adds it
    marked = page.execute_script("return [...document.querySelectorAll('.line.marked')].map((l) => l.textContent)")
    assert any("= gelu(" in line for line in marked)
    assert page.execute_script("return document.querySelector('.row.chosen .name').textContent") == "gelu 1"


def test_a_line_of_code_leads_to_its_node(page):
    find(page, "relu 2")
    page.execute_script(
        "[...document.querySelectorAll('.line.known')].find((l) => l.textContent.includes(' = relu(')).click()"
    )
    assert "relu 2 = relu(" in text(page, "#parts")  # though layers that are alike share the code


def test_a_click_on_a_line_between_kernels_shows_the_reason(page):
    click(page, ".link.declined .hit")
    assert "are two kernels: one anchor each" in text(page, "#details .reason")
    click(page, ".link.fused .hit")
    assert text(page, "#details .tag") == "fused"


def test_strokes_of_fused_and_declined_edges_differ(page):
    dashes = [
        page.execute_script(
            "return getComputedStyle(document.querySelector(arguments[0])).strokeDasharray", f".link.{state} .stroke"
        )
        for state in ("fused", "declined", "flow")
    ]
    assert len(set(dashes)) == 3


def test_layers_that_are_alike_are_folded(page):
    count = "return document.querySelectorAll('[data-kernel]').length"
    page.execute_script("document.querySelector('.tools button:last-child').click()")
    assert page.execute_script("return document.querySelector('[data-layers]') !== null")
    folded = page.execute_script(count)
    page.execute_script("document.querySelector('[data-layers]').dispatchEvent(new MouseEvent('click'))")
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert page.execute_script("return document.querySelector('[data-layers]') === null")
    assert page.execute_script(count) > folded - 2


def test_every_view_opens_in_light_and_dark(page):
    backs = set()
    for _ in range(2):
        page.execute_script("document.querySelector('#theme').click()")
        backs.add(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
        for name in ("kernels", "decisions", "passes", "times", "memory", "graph"):
            page.execute_script(f"document.querySelector('#tab-{name}').click()")
            assert len(text(page, "#view")) > 40
    assert len(backs) == 2


def test_keys_go_from_kernel_to_kernel(page):
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.querySelector('svg.graph').focus()")
    for expected in ("Kernel 1", "Kernel 2"):
        page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
        assert text(page, "#details h2") == expected
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert text(page, "#details h2") == "Where the time goes"


def test_everything_that_is_clicked_has_a_name(page):
    nameless = page.execute_script(
        "return [...document.querySelectorAll('button, input, select, [role=button]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


def test_pages_of_small_graphs_and_of_measured_ones(driver, tmp_path):
    """Shows every view of graphs without elements, with one, of a training step, and of one whose times are known."""
    empty, one, step = Graph("empty"), Graph("one"), Graph("step")
    empty.output(empty.relu(empty.tensor("x", (0, 6))), name="y")
    one.output(one.relu(one.tensor("x", (1,))), name="y")
    w = step.tensor("w", (8, 4))
    loss = step.reduction(step.relu(step.tensor("x", (16, 8)) @ w), mode="add", axes=(0, 1))
    step.assign(w, w - 0.1 * step.gradients(loss, [w])[0])
    step.output(loss, name="loss")
    facts = facts_of([plan(g, Options(target=H200)) for g in (empty, one, step)], H200, title="small")
    listed = [{"name": k["name"], "us": 5} for k in facts["graphs"][2]["kernels"]]
    (tmp_path / "times.json").write_text(json.dumps({"kernels": listed}))
    opened(driver, save(with_times(facts, tmp_path / "times.json"), tmp_path / "small.html"))
    for number in range(3):
        driver.execute_script(
            "const graphs = document.querySelector('#graphs'); graphs.value = arguments[0];"
            "graphs.dispatchEvent(new Event('change'));"
            "for (const tab of [...document.querySelectorAll('[role=tab]')]) document.getElementById(tab.id).click();",
            number,
        )
    assert "Time, measured" in text(driver, "#glance")
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_names_of_users_are_text(driver, tmp_path):
    graph = Graph("names")
    x = graph.tensor("x", (8, 8))
    graph.output(graph.relu(x, name="y"))
    facts = facts_of([plan(graph, Options(target=H200))], H200, title="</script><script>window.bad = 1</script>")
    bad = "</script><img src=x onerror='window.bad = 2'><!--"
    for item in facts["graphs"][0]["items"]:
        item |= {"name": bad, "op": bad, "scope": bad, "place": bad, "parts": [bad]}
    facts["graphs"][0]["name"] = bad
    opened(driver, save(facts, tmp_path / "names.html"))
    click(driver, "[data-item]")
    for name in ("kernels", "passes", "graph"):
        driver.execute_script(f"document.querySelector('#tab-{name}').click()")
    assert driver.execute_script("return window.bad") is None
    assert bad in text(driver, "#details")


def test_registers_stand_beside_the_kernel(driver, tmp_path):
    made = plan(layers(1, "one"), Options(target=H200))
    opened(driver, write([made], H200, tmp_path / "one.html", title="one"))
    click(driver, "[data-kernel='0']")
    source = load(tmp_path / "one.html")["sources"][0]
    assert f"registers{source['registers']}" in text(driver, "#details")


@pytest.mark.slow
def test_the_pictures_of_the_documentation(tmp_path):
    """With FUSEGRAPH_UPDATE_GOLDEN=1 in the environment they are drawn into docs."""
    pytest.importorskip("torch")
    folder = ROOT / "docs" if os.environ.get("FUSEGRAPH_UPDATE_GOLDEN") else tmp_path
    runpy.run_path(str(ROOT / "tools" / "report_pictures.py"))["main"](folder)
    for name in ("report.png", "report-dark.png"):
        drawn, shown = (file.read_bytes() for file in (folder / name, ROOT / "docs" / name))
        assert drawn[:4] == shown[:4] == b"\x89PNG"
        assert drawn[16:24] == shown[16:24]  # width and height
        assert 0.5 < len(drawn) / len(shown) < 2


@pytest.mark.slow
def test_a_thousand_nodes_do_not_stutter(driver, tmp_path):
    graph = layers(167, "thousand")
    assert graph.node_count > 1000
    page = written(graph, tmp_path)
    assert page.stat().st_size < 5e6
    opened(driver, page)
    driver.execute_script("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'f', bubbles: true}))")
    frames = driver.execute_async_script(
        """
        const done = arguments[0], svg = document.querySelector('svg.graph'), times = [];
        let last = performance.now();
        requestAnimationFrame(function step() {
          const now = performance.now();
          times.push(now - last);
          last = now;
          if (times.length > 60) return done(times.sort((a, b) => a - b));
          svg.dispatchEvent(new WheelEvent('wheel', {deltaY: 200, ctrlKey: times.length % 20 > 15, clientX: 400,
            clientY: 400, bubbles: true, cancelable: true}));
          requestAnimationFrame(step);
        });
        """
    )
    assert frames[30] < 60  # the median, in milliseconds, on a machine that does other things too
    find(driver, "gelu 140")
    assert "gelu 140" in text(driver, "#details")
