"""The examples of docs/graphs.md and docs/recording.md run, in order, on the host driver; what the pages name exists."""

import re
from pathlib import Path

import cudnn
import numpy as np
import pytest
from harness import network_references as networks
from harness.arrays import Arrays
from harness.process import as_default

import handlepool
from handlepool import HandlePool
from handlepool.testing import reference

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not here")


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_examples_run(make_driver, capsys):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        arrays = Arrays(pool)
        names = {"handlepool": handlepool, "x": arrays.random(2, 16, 14, 14), "w": arrays.random(8, 16, 3, 3)}
        expected = reference.conv2d(arrays.take(names["x"]), arrays.take(names["w"]), padding=1, activation="relu")
        _, *blocks, residual, products, weighed = blocks_of("graphs.md")
        for block in blocks:
            exec(block, names)
            if "result" in block:
                names["y"] = names["result"]
            assert arrays.error(names["y"], expected) < 1e-5
        names |= {"b": arrays.random(8), "z": arrays.random(2, 8, 14, 14)}
        exec(residual, names)
        x, w, b, z = (arrays.take(names[name]) for name in "xwbz")
        assert arrays.error(names["y"], reference.conv2d(x, w, padding=1, bias=b, add=z, activation="relu")) < 1e-5
        exec(products, names)
        rows, weights = (arrays.take(names[name]) for name in ("rows", "weights"))
        assert arrays.error(names["scores"], reference.matmul(rows, rows.T, activation="relu")) < 1e-5
        assert arrays.error(names["features"], reference.matmul(weights, weights.T)) < 1e-5
        exec(weighed, names)
        assert arrays.error(names["y"], x / (1 + np.exp(-x.mean((2, 3), keepdims=True)))) < 1e-5
    assert len(blocks) == 5
    assert "host_im2col" in capsys.readouterr().out


def test_the_examples_of_pooling_run(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        arrays = Arrays(pool, layout="NHWC")
        x, shortcut = arrays.random(2, 16, 14, 14), arrays.random(2, 16, 14, 14)
        names = {"x": x, "shortcut": shortcut, "handlepool": handlepool, "states": handlepool.ParallelStates(2, pool=pool)}
        total = np.maximum(arrays.take(x) + arrays.take(shortcut), 0)
        small = reference.max_pool2d(np.concatenate([arrays.take(x), total], 1), 3, stride=2, padding=1)
        _, first, second, third = blocks_of("pooling.md")
        exec(first, names)
        assert arrays.error(names["means"], small.mean((2, 3))) < 1e-5
        exec(second, names)
        whole = reference.max_pool2d(arrays.take(x), 3, stride=1, padding=1), arrays.take(x) + arrays.take(shortcut)
        assert arrays.error(names["means"], np.concatenate(whole, 1).mean((2, 3))) < 1e-5
        names |= {"w": arrays.put(np.ones((16, 16, 1, 1))), "b": arrays.put(np.zeros(16))}
        exec(third, names)
        every = np.repeat(arrays.take(x).sum(1, keepdims=True), 16, 1)
        assert arrays.error(names["both"], np.concatenate([every, whole[0]], 1)) < 1e-5


def test_the_examples_of_networks_operations_run(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        arrays, halves = Arrays(pool, layout="NHWC"), Arrays(pool, "float16")
        x, w = arrays.random(2, 16, 14, 14), arrays.random(16, 8, 4, 4)
        names = {"handlepool": handlepool, "x": x, "w": w, "products": halves.random(2, 10, 3, 4, 8)}
        names["taken"] = arrays.take
        names |= {name: arrays.random(16) for name in ("weight", "bias", "mean")} | {"variance": arrays.put(np.ones(16))}
        _, normalised, gating, moved, transposed, attended = blocks_of("networks.md")
        exec(normalised, names)
        assert arrays.error(names["total"], networks.softmax(names["taken"](names["y"]), axis=1)) < 1e-5
        layers = {"w1": (4, 16), "b1": (4,), "w2": (16, 4), "b2": (16,)}
        names |= {name: arrays.random(*shape) for name, shape in layers.items()}
        exec(gating, names)
        expected = networks.squeeze_excite(*(arrays.take(names[each]) for each in ("x", *layers)), "swish")
        assert arrays.error(names["gated"], expected) < 1e-5
        exec(moved, names)
        assert arrays.error(names["large"], networks.interpolate2d(arrays.take(x), scale_factor=2, mode="bilinear")) < 1e-5
        exec(transposed, names)
        expected = networks.conv_transpose2d(*map(arrays.take, (x, w)), stride=(2, 2), padding=((1, 1), (1, 1)))
        assert arrays.error(names["larger"], np.maximum(expected, 0)) < 1e-3
        exec(attended, names)
        q, k, v = halves.take(names["products"]).transpose(2, 0, 3, 1, 4)
        assert halves.error(names["seen"], networks.attention(q, k, v, is_causal=True)) < 1e-2


def test_the_examples_of_elementwise_functions_run(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        arrays = Arrays(pool, layout="NHWC")
        names = {
            "handlepool": handlepool,
            "np": np,
            "x": arrays.random(2, 16, 6, 6),
            "s": arrays.random(2, 16, 1, 1),
            "scale": arrays.random(16, 1, 1),
        }
        names |= {
            "w1": arrays.random(4, 16, 1, 1),
            "w2": arrays.random(16, 4, 1, 1),
            "b1": arrays.random(4),
            "b2": arrays.random(16),
        }
        names |= {"mean": arrays.random(3, 1, 1), "deviation": arrays.put(np.full((3, 1, 1), 0.25))}
        names["image"] = pool.driver.asarray(np.full((1, 3, 4, 4), 250, np.uint8))
        x, s, scale, w1, w2, b1, b2, mean = (
            arrays.take(names[name]) for name in ("x", "s", "scale", "w1", "w2", "b1", "b2", "mean")
        )
        _, gating, products, numbers, image, squeezing = blocks_of("elementwise.md")
        exec(gating, names)
        once = x * np.clip(s + 3, 0, 6) / 6
        assert arrays.error(names["y"], once) < 1e-5
        assert arrays.error(names["x"], once) < 1e-5
        exec(products, names)
        assert arrays.error(names["halved"], np.maximum(once * scale + once, 0) / 2) < 1e-5
        exec(numbers, names)
        assert arrays.error(names["y"], np.clip(once, -6, 6) / 10) < 1e-5
        exec(image, names)
        assert names["x16"].dtype == np.float16
        assert arrays.error(names["x16"], np.broadcast_to((250 / 255 - mean) * 4, (1, 3, 4, 4))) < 1e-3
        exec(squeezing, names)
        inner = np.maximum(once.mean((2, 3)) @ w1[:, :, 0, 0].T + b1, 0) @ w2[:, :, 0, 0].T + b2
        right = once * np.clip(inner + 3, 0, 6)[:, :, None, None] / 6
        assert arrays.error(names["y"], right) < 1e-5
        assert len(names["program"].explain().nodes) == 4


def test_the_examples_of_arrays_run(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        names = {"handlepool": handlepool, "np": np}
        exec(next(block for block in blocks_of("arrays.md") if "asnumpy" in block), names)
        assert np.array_equal(names["values"], np.full((1, 8, 8, 8), 2, np.float32))


def test_the_example_of_recording_runs(make_driver):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        arrays = Arrays(pool)
        w, used = arrays.random(8, 16, 3, 3), []
        images, next_images = ([arrays.random(2, 16, 14, 14) for _ in range(3)] for _ in range(2))
        names = {
            "handlepool": handlepool,
            "conv": lambda x: handlepool.conv2d(x, w),
            "images": images,
            "next_images": next_images,
            "use": lambda outputs: used.extend(map(arrays.take, outputs)),
        }
        function, _, first, state, second, tuned, third = blocks_of("recording.md")
        exec(function, {"__name__": "example"})
        exec(state, {"__name__": "example"})
        exec(first, names)
        assert names["program"].closed
        names |= {"v": arrays.random(8, 16, 3, 3), "w": w, **{x: arrays.random(2, 16, 14, 14) for x in ("x", "x2", "x3")}}
        exec(second, names)
        exec(tuned, names)
        v = arrays.take(names["v"])
        for x, block, y in (("x", "", "program.outputs"), ("x3", third, "y")):
            exec(block, names)
            x = arrays.take(names[x])
            right = reference.conv2d(x, v, padding=1) + reference.conv2d(x, arrays.take(w), padding=1)
            assert arrays.error(eval(y, names), right) < 1e-5
        assert names["program"].explain().got in (1, 2)
        names["program"].close()
        expected = [reference.conv2d(arrays.take(x), arrays.take(w)) for x in next_images]
    assert len(used) == 3
    for y, right in zip(used, expected, strict=True):
        assert np.abs(y - right).max() < 1e-4


def test_the_examples_of_serving_run(make_driver, capsys):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        names: dict[str, object] = {}
        threads, warm, loop, executor = blocks_of("serving.md")
        exec(threads, names)
        assert sorted(names["results"]) == [*range(8)]
        for number, scores in names["results"].items():
            assert scores.shape == (1, 8, 8 + number % 3, 8)
            assert np.isclose(scores[0, 0, 4, 4], 2 * 36 * 0.1 * number)
        # While one thread records, the calls of the others run eagerly.
        assert re.match(r"RecordedStats\(keys=[123]", capsys.readouterr().out)
        assert len(threads.split("w = driver")[1].splitlines()) <= 30
        exec(warm, names)
        assert names["network"].stats().recorded == 1
        exec(loop, names)
        for number, scores in enumerate(names["scores"]):
            assert isinstance(scores, np.ndarray)
            assert np.isclose(scores[0, 0, 4, 4], 36 * 0.1 * number)
        exec(executor, names)
        assert isinstance(names["scores"], np.ndarray)
        assert np.isclose(names["scores"][0, 0, 4, 4], 36 * 0.1 * 3)
        names["network"].clear()


def test_the_examples_of_spreading_run(make_driver, capsys):
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        random, got = np.random.default_rng(1), []
        images = [random.standard_normal((1, 8, 9, 9)).astype("float32") for _ in range(5)]
        w = random.standard_normal((8, 8, 3, 3)).astype("float32")
        names = {"handlepool": handlepool, "images": images, "weights": w, "keep": got.append}
        _, first, second = blocks_of("spreading.md")
        exec(first, names)
        for y, x in zip(got, images, strict=True):
            right = reference.conv2d(x, w, padding=1, activation="relu")
            assert np.abs(y - right).max() / np.abs(right).max() < 1e-5
        images[2] = images[2][:, :3]
        exec(second, names)
    assert capsys.readouterr().out.startswith("2 ")


def test_the_examples_of_libraries_that_keep_handles_run(make_driver):
    before = cudnn.create_handle
    with HandlePool(driver=make_driver()) as pool, as_default(pool):
        installed, asked = blocks_of("handle-caches.md")
        names = {}
        exec(installed, names)
        assert names["handle"].backend_handle is None
        exec(asked, names)
        assert names["handle"] is pool.get_handle()
        assert names["scratch"].shape == (1 << 20,)
    assert cudnn.create_handle is before


def test_the_fourteen_ways_of_keeping_a_handle_are_those_that_are_tested():
    rows = re.findall(r"^\| ([^|]*?) \| [^|]* \| [^|]* \| [^|]* \|$", (DOCS / "handle-caches.md").read_text(), re.MULTILINE)[1:]
    tests = (Path(__file__).parents[1] / "gpu" / "test_gpu_integrations_cudnn.py").read_text(encoding="utf-8")
    ways = re.findall(r'^    "(.*)": \(\w+, "\w+"\),$', tests, re.MULTILINE)
    assert len(rows) == len(ways) + 1 == 14
    assert "the frontend's `cudnn.Graph`" in rows
    named = {
        "PyTorch's threads": "PyTorch's test with threads",
        "the frontend's default handle": "the frontend's `get_default_handle`",
    }
    assert {named.get(way, way) for way in ways} < set(rows)


def test_the_examples_with_torch_run(make_driver):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    with HandlePool(driver="cuda" if torch.cuda.is_available() else make_driver()) as pool, as_default(pool):
        names = {}
        for block in blocks_of("torch.md"):
            exec(block, names)
        x, w, c = (names[name] for name in "xwc")
        torch.testing.assert_close(names["y"], torch.nn.functional.conv2d(x, w, padding=1), rtol=1e-2, atol=1e-2)
        assert w.grad.shape == w.shape
        with torch.no_grad():
            torch.testing.assert_close(c, names["first"](names["second"](x)), rtol=1e-2, atol=1e-2)


def test_the_examples_with_models_of_torch_run(make_driver, request):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    if not torch.cuda.is_available():
        request.getfixturevalue("torch_host")
    with HandlePool(driver="cuda" if torch.cuda.is_available() else make_driver()) as pool, as_default(pool):
        names = {}
        for block in blocks_of("torch-models.md"):
            exec(block, names)
        with torch.no_grad():
            right = names["model"](names["x"])
        for name in ("y", "first", "second"):
            torch.testing.assert_close(names[name], right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", text):
        to = page.parent / target if target else page
        assert to.exists(), target
        headings = re.findall(r"^#+ (.*)$", to.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], anchor


def test_the_index_links_every_page():
    linked = re.findall(r"\]\(([^)#:]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    root = DOCS.parent
    others = {root / "README.md", root / "CHANGELOG.md", *(root / "benchmarks" / "results").glob("*/README.md")}
    assert {(DOCS / path).resolve() for path in linked} == {*DOCS.rglob("*.md"), *others} - {DOCS / "index.md"}


def test_the_reference_has_every_public_name_once():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto(?:class|function|exception):: handlepool\.(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted(handlepool.__all__)


@pytest.mark.parametrize(
    "text",
    re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    if DOCS.exists()
    else [],
)
def test_a_message_of_troubleshooting_is_one_of_the_package(text):
    if text.startswith("cudaError"):
        return
    words = re.compile(r"\W+".join(map(re.escape, re.findall(r"\w+", text))))
    # A message may be divided into several literals, and values stand in braces.
    for path in Path(handlepool.__file__).parent.rglob("*.py"):
        source = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        if words.search(source):
            return
    pytest.fail(f"no message has the words {text!r}")


def test_the_table_of_the_architecture_names_what_exists():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]* \| (`.*) \|$", page.partition("## The rooms")[0], re.MULTILINE)
    assert len(rows) > 15
    package = Path(handlepool.__file__).parent
    for row in rows:
        source = None
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith((".py", ".pyi", "/")):
                assert (package / name).exists(), name
                source = (package / name).read_text(encoding="utf-8") if name.endswith(".py") else source
            else:  # in the file before it
                last = name.rpartition(".")[2]
                assert re.search(rf"\b{last}\b", source or ""), row
