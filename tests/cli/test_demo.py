"""The demo: photographs of every kind, filters from files, and the whole of it on the host driver."""

import dataclasses
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="the demo's extra is not installed: pip install 'handlepool[demo]'")
pytest.importorskip("matplotlib", reason="the demo's extra is not installed: pip install 'handlepool[demo]'")

from handlepool import ContractError, HandlePool  # noqa: E402
from handlepool.cli import demo  # noqa: E402
from handlepool.cli.demo import figure, measure, network, network_figure  # noqa: E402
from handlepool.cli.demo.filters import Filter, builtin_filters, chain_of, load_filters  # noqa: E402
from handlepool.cli.demo.images import load_photograph, sample_photograph  # noqa: E402
from handlepool.cli.demo.measure import Report, Span, Times  # noqa: E402
from handlepool.drivers.host.driver import HostDriver  # noqa: E402
from handlepool.errors import ArgumentError, DriverNotAvailableError  # noqa: E402

RNG = np.random.default_rng(7)
COLOURS = RNG.integers(0, 256, (40, 60, 3), dtype=np.uint8)


def run_demo(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "handlepool", "demo", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Photographs


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "LAB", "I;16", "I", "F"])
def test_every_mode_gives_three_channels_from_0_to_1(tmp_path, mode):
    if mode == "LAB":
        image = Image.frombytes("LAB", (60, 40), COLOURS.tobytes())
    elif mode == "I;16":
        image = Image.fromarray(COLOURS[..., 0].astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(COLOURS[..., 0].astype(np.float32) / 255)
    else:
        image = Image.fromarray(COLOURS).convert(mode)
    assert image.mode == mode
    image.save(tmp_path / "a.tiff")
    pixels = load_photograph(tmp_path / "a.tiff")
    assert pixels.shape == (40, 60, 3)
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert pixels.std() > 0.1
    assert pixels.dtype == np.float32
    if mode == "RGB":
        np.testing.assert_allclose(pixels, COLOURS / 255, atol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_turned_upright(tmp_path, orientation):
    upright = np.zeros((16, 24, 3), dtype=np.uint8)
    upright[:8, :8] = 255  # white in the upper left corner alone
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_allclose(load_photograph(tmp_path / "a.png"), upright / 255)


@pytest.mark.parametrize(("depth", "suffix"), [(12, "tiff"), (16, "tiff"), (16, "png")])
def test_sixteen_bit_values_keep_their_precision_and_their_depth(tmp_path, depth, suffix):
    values = np.linspace(0, 2**depth - 1, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    pixels = load_photograph(tmp_path / f"a.{suffix}")
    np.testing.assert_allclose(pixels[..., 0], values / (2**depth - 1), atol=1e-6)
    assert len(np.unique(pixels)) == len(np.unique(values)) > 256


def test_floats_out_of_range_are_stretched_and_holes_are_dark(tmp_path):
    values = np.linspace(-3, 5, 64, dtype=np.float32).reshape(8, 8)
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "a.tiff")
    pixels = load_photograph(tmp_path / "a.tiff")
    assert pixels[0, 0, 0] == 0
    assert pixels[7, 7, 0] == 1


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette"])
def test_transparent_parts_are_white(tmp_path, kind):
    if kind == "palette":
        image = Image.new("P", (20, 20), 0)
        image.putpalette([0, 0, 0, 200, 0, 0])
        image.paste(1, (0, 0, 10, 20))
        image.save(tmp_path / "a.png", transparency=0)
        opaque = (200 / 255, 0, 0)
    else:
        image = Image.new(kind, (20, 20), (0, 0) if kind == "LA" else (0, 0, 0, 0))
        image.paste((100, 255) if kind == "LA" else (100, 100, 100, 255), (0, 0, 10, 20))
        image.save(tmp_path / "a.png")
        opaque = (100 / 255,) * 3
    pixels = load_photograph(tmp_path / "a.png")
    np.testing.assert_allclose(pixels[5, 5], opaque, atol=1e-6)
    np.testing.assert_allclose(pixels[5, 15], (1, 1, 1))


def test_a_large_picture_is_reduced_to_the_cap_and_a_small_one_is_not(tmp_path):
    Image.fromarray(COLOURS).resize((600, 400)).save(tmp_path / "a.jpg")
    assert load_photograph(tmp_path / "a.jpg", 150).shape == (100, 150, 3)
    assert load_photograph(tmp_path / "a.jpg", 1024).shape == (400, 600, 3)


@pytest.mark.parametrize("content", [b"", b"no picture at all", b"\x89PNG\r\n\x1a\n truncated", "half"])
def test_an_unreadable_image_is_named(tmp_path, content):
    path = tmp_path / "broken.jpg"
    if content == "half":
        Image.fromarray(COLOURS).resize((300, 300)).save(path)
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"cannot read the image .*broken\.jpg"):
        load_photograph(path)


def test_a_missing_image_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "nowhere.png", tmp_path):
        with pytest.raises(ArgumentError, match=r"image file .* does not exist"):
            load_photograph(path)


@pytest.mark.parametrize("size", [-1, 0, 15, 8193])
def test_a_size_out_of_range_is_named(size):
    with pytest.raises(ArgumentError, match=f"{size} pixels is out of range"):
        load_photograph(sample_photograph(), size)


# Filters


def test_the_built_in_filters_are_at_least_eight_of_two_sizes():
    filters = builtin_filters()
    assert len(filters) >= 8
    assert {filter.size for filter in filters} == {3, 5}
    edges = next(filter for filter in filters if filter.name == "edges")
    assert edges.kernel[1, 1] == -8
    assert edges.kernel.sum() == 0


def test_weights_filter_each_channel_by_itself():
    weights = builtin_filters()[0].weights()
    assert weights.shape == (3, 3, 3, 3)
    assert np.array_equal(np.abs(weights).sum(axis=(2, 3)) > 0, np.eye(3, dtype=bool))


@pytest.mark.parametrize(
    "document",
    [{"one": [[1]], "two": [[0, 1, 0]] * 3}, [{"name": "one", "kernel": [[1.0]]}, {"name": "two", "kernel": [[0, 1, 0]] * 3}]],
)
def test_both_forms_of_a_filter_file(tmp_path, document):
    path = tmp_path / "filters.json"
    path.write_text(json.dumps(document), encoding="utf-8-sig")  # with the mark that some editors put in front
    one, two = load_filters(path)
    assert (one.name, one.size, two.name, two.size) == ("one", 1, "two", 3)
    np.testing.assert_array_equal(two.kernel, [[0, 1, 0]] * 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON|is not a filter"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("3", "the document is 3; expected"),
        ("{}", "the file has 0 filters; give 1 to 64"),
        ("[]", "the file has 0 filters"),
        (json.dumps({f"f{i}": [[1]] for i in range(65)}), "the file has 65 filters"),
        ('["a"]', "the entry 'a' is not a filter"),
        ('[{"name": "a"}]', "is not a filter"),
        ('{"a": [[1]], "a": [[2]]}', "the key 'a' more than once"),
        ('[{"name": "a", "kernel": [[1]]}, {"name": "a ", "kernel": [[2]]}]', "2 filters have the name 'a'"),
        ('{"": [[1]]}', "'' is no name"),
        ('{"a\\nb": [[1]]}', "is no name"),
        ('[{"name": 3, "kernel": [[1]]}]', "3 is no name"),
        ('{"a": []}', r"the kernel of 'a' is \[\]"),
        ('{"a": 1}', "the kernel of 'a' is 1; give a list of rows"),
        ('{"a": [1]}', "give a list of rows"),
        ('{"a": [[]]}', "1 rows of 0 numbers"),
        ('{"a": [[1, 2, 3], [4, 5], [6, 7, 8]]}', "3 rows of 2 and 3 numbers; give as many columns as rows"),
        ('{"a": [[1, 2, 3]]}', "1 rows of 3 numbers"),
        ('{"a": [[1, 2], [3, 4]]}', "is 2 by 2; give an odd size"),
        (json.dumps({"a": [[0] * 33] * 33}), "is 33 by 33; give an odd size of 1 to 31"),
        ('{"a": [["1"]]}', "holds '1'; give finite"),
        ('{"a": [[true]]}', "holds True"),
        ('{"a": [[null]]}', "holds None"),
        ('{"a": [[NaN]]}', "holds nan"),
        ('{"a": [[-Infinity]]}', "holds -inf"),
        ('{"a": [[1e39]]}', r"holds 1e\+39"),
        ('{"a": [[1' + "0" * 400 + "]]}", "holds 10000"),
    ],
)
def test_a_bad_filter_file_is_named_with_its_value_and_the_remedy(tmp_path, content, complaint):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=complaint) as caught:
        load_filters(path)
    assert "bad.json" in str(caught.value)


# The report


def found(one_stream: float, recorded: float, relative: float = 0.0) -> network.NetworkReport:
    """A report of the network with these milliseconds; twice as many forked and on one lane."""
    times = {network.ONE_STREAM: one_stream, network.FORKED: 2 * recorded}
    times |= {network.ONE_LANE: 2 * recorded, network.RECORDED: recorded}
    calls = (network.Ran("conv2d", 0, 0.0, 2.0), network.Ran("concat", 3, 2.0, 3.0))
    return network.NetworkReport((4, 4), np.zeros((2, 2, 3), np.float32), relative, times, 3, calls)


def reported(driver: str = "cuda", **times: float) -> Report:
    spans = (Span("a", 0, 1, 0.0, 2.0), Span("b", 1, 2, 0.0, 2.0), Span("c", 2, 1, 3.0, 4.0))
    return Report(driver, 2, (), spans, (), Times(1, 1, 1, 1, 1), found(**times))


def test_the_title_on_a_gpu_compares_with_the_best_single_stream():
    claim = network_figure.claim
    assert claim(reported(one_stream=6.0, recorded=2.0)).endswith("4 lanes: 2.00 times as fast as the best on one stream")
    assert claim(reported(one_stream=3.0, recorded=2.0)).endswith("4 lanes: 1.50 times as fast as the best on one stream")
    assert claim(reported(one_stream=2.0, recorded=4.0)).endswith("4 lanes: 2.00 times the best time of one stream")


def test_the_title_on_the_host_driver_has_no_times():
    assert network_figure.claim(reported("host", one_stream=6.0, recorded=2.0)).endswith(
        "1.0 calls at a time, and every result is right"
    )
    wrong = network_figure.claim(reported("host", one_stream=6.0, recorded=2.0, relative=1.0))
    assert wrong.endswith("1 results are wrong")


def test_without_a_time_line_the_picture_is_drawn(tmp_path):
    report = reported(one_stream=6.0, recorded=2.0)
    pixels = np.zeros((20, 30, 3), np.float32)
    result = measure.Result("a", (3,), pixels, 1.0, 1.0, 0.0, 0.0, "an engine", 0)
    figure.draw(dataclasses.replace(report, results=(result,), spans=()), pixels, "a title", tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert "at a time" not in measure.render(dataclasses.replace(report, spans=(), results=(result,)))


def test_overlap_counts_the_filters_that_ran_at_a_time():
    assert reported(one_stream=1.0, recorded=1.0).overlap == pytest.approx(5 / 3)


# The chain


@pytest.fixture
def one_round(monkeypatch):
    """Measurements end after one round."""
    for module in (measure, network):
        monkeypatch.setattr(module, "_BUDGET", 0.0)


def measured():
    """What the demo finds over a schedule that means harm, with the order of accesses checked."""
    with HandlePool(driver=HostDriver(scheduler="adversarial", check_order=True)) as pool:
        return measure.measure(COLOURS[:12, :16] / np.float32(255), builtin_filters()[:2], states=3, pool=pool)


def test_g17_the_chain_of_the_demo_is_in_order_and_compared(one_round):
    report = measured()
    assert [result.name for result in report.results] == ["edges", "sobel x", "edges, then edges"]
    assert all(result.right for result in report.results)
    *_, first, then = report.spans
    assert first.result == then.result == 2
    assert {span.lane for span in report.spans} == {0, 1, 2}
    assert report.differing == ()


def test_a_recorded_filter_that_differs_is_wrong(one_round, monkeypatch):
    known = measure._Work.recorded
    monkeypatch.setattr(
        measure._Work, "recorded", lambda work, names, results: known(work, names, [spoilt(results[0]), *results[1:]])
    )
    assert measured().wrong == ["edges, recorded"]


def spoilt(result):
    """Move the pixels that the recorded result is compared with."""
    return dataclasses.replace(result, pixels=result.pixels + 10)


def test_the_network_is_right_in_each_way_and_its_calls_ran_on_lanes_behind_what_they_read(one_round):
    with HandlePool(driver=HostDriver(scheduler="adversarial", check_order=True)) as pool:
        report = network.measure(COLOURS / np.float32(255), states=3, pool=pool)
    assert report.right
    assert report.size == (40, 60)
    assert report.pixels.shape == (20, 30, 3)
    assert 0 <= report.pixels.min() < report.pixels.max() <= 1
    assert report.repeats == 3
    assert all(report.times[way] > 0 for way in (network.ONE_STREAM, network.FORKED, network.ONE_LANE, network.RECORDED))
    names = [call.name for call in report.calls]
    assert [names.count(kind) for kind in ("conv2d", "max_pool2d", "concat")] == [20, 3, 3]
    assert {call.lane for call in report.calls} == set(range(network.LANES))
    last = max(report.calls, key=lambda call: call.end)
    assert all(call.end <= last.start for call in report.calls if call is not last)


def test_control_a_network_that_is_computed_otherwise_is_wrong(monkeypatch, one_round):
    monkeypatch.setattr(network._Reference, "max_pool2d", staticmethod(lambda x, *_, **how: x))
    with HandlePool(driver=HostDriver()) as pool:
        report = network.measure(COLOURS / np.float32(255), states=2, pool=pool)
    assert not report.right


def test_g17_control_without_order_the_chain_of_the_demo_reads_too_early(without, one_round):
    without("the order of forks")
    with pytest.raises(ContractError, match="not ordered"):
        measured()


def test_the_chain_is_a_blur_and_the_edges_or_what_a_file_has_first_and_last():
    assert [filter.name for filter in chain_of(builtin_filters())] == ["box blur", "edges"]
    a, b, c = (Filter(name, np.ones((1, 1), np.float32)) for name in "abc")
    assert chain_of([a, b, c]) == (a, c)
    assert chain_of([a]) == (a, a)


# The driver


def test_the_demo_falls_back_to_host_and_says_why(no_gpu, monkeypatch):
    monkeypatch.delenv("HANDLEPOOL_DRIVER", raising=False)
    assert demo.choose_driver(None) == ("host", "because there is no GPU")


def test_a_driver_that_was_asked_for_is_not_replaced(no_gpu, monkeypatch):
    with pytest.raises(DriverNotAvailableError, match=r"the cuda driver was asked for .*there is no GPU"):
        demo.choose_driver("cuda")
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "cuda")
    with pytest.raises(DriverNotAvailableError, match="HANDLEPOOL_DRIVER"):
        demo.choose_driver(None)


# All of it


def test_the_demo_runs_on_the_host_driver_and_draws(tmp_path):
    Image.fromarray(COLOURS).resize((96, 64)).save(tmp_path / "photo.jpg")
    filters = {"shift": [[0, 0, 0], [1, 0, 0], [0, 0, 0]], "$n$ in 猫": [[1, 2, 1], [2, 4, 2], [1, 2, 1]], "one": [[2]]}
    (tmp_path / "filters.json").write_text(json.dumps(filters), encoding="utf-8")
    out = tmp_path / "out.png"
    done = run_demo(
        tmp_path / "photo.jpg", "--out", out, "--states", 2, "--filters", tmp_path / "filters.json", "--driver", "host"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "driver   host (asked for by name)" in done.stdout
    assert "say nothing about a GPU" in done.stdout
    assert "a small network, 26 calls over 96 x 64" in done.stdout
    assert "recorded, 4 lanes" in done.stdout
    for name in (*filters, "shift, then one", "the last is a chain, fork.run(g, fork.run(f, x))"):
        assert name in done.stdout
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.width >= 1000
        assert np.asarray(image.convert("L")).std() > 10


@pytest.mark.slow
def test_the_demo_without_an_image_uses_the_sample_and_the_built_in_filters(tmp_path):
    done = run_demo("--out", tmp_path / "out.png", "--size", 48, "--driver", "host")
    assert done.returncode == 0, done.stderr
    assert "grace_hopper.jpg, 41 x 48 pixels" in done.stdout
    for name in (*(filter.name for filter in builtin_filters()), "box blur, then edges"):
        assert name in done.stdout
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.png",), "image file 'nowhere.png'"),
        (("--filters", "nowhere.json"), "cannot read filter file 'nowhere.json'"),
        (("--states", "0"), "0 states are out of range"),
        (("--states", "33"), "33 states are out of range"),
        (("--states", "many"), "invalid int value: 'many'"),
        (("--size", "0"), "0 pixels is out of range"),
        (("--out", "nowhere/out.png"), "lies in a folder that does not exist"),
        (("--out", "."), "is a folder"),
        (("--driver", "abacus"), "invalid choice: 'abacus'"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.setenv("HANDLEPOOL_DRIVER", "host")
    monkeypatch.chdir(tmp_path)
    _assert_one_line(call_main("demo", *arguments), complaint)


def call_main(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process; returns exit status and stderr."""
    import contextlib
    import io

    from handlepool.__main__ import main

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    return status, errors.getvalue()


def _assert_one_line(outcome: tuple[int, str], complaint: str) -> None:
    status, errors = outcome
    assert status == 2
    assert complaint in errors
    assert errors.count("\n") == 1
    assert errors.endswith("\n")


def test_out_must_not_be_the_photograph(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(COLOURS).save(path)
    before = path.read_bytes()
    _assert_one_line(call_main("demo", str(path), "--out", str(path), "--driver", "host"), "is the photograph itself")
    assert path.read_bytes() == before


def test_cuda_without_a_gpu_is_one_line_and_exit_status_2(no_gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _assert_one_line(call_main("demo", "--driver", "cuda"), "the cuda driver was asked for (asked for by name)")


@pytest.mark.slow
def test_a_result_that_is_wrong_is_named_and_exit_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "reference_conv2d", lambda x, w, **_: np.full(x.shape, 1e3))
    options = Namespace(image=None, out=tmp_path / "out.png", states=2, size=32, driver="host", filters=_one_filter(tmp_path))
    assert demo.main(options) == 1
    output = capsys.readouterr()
    assert "WRONG" in output.out
    assert "further than 2e-3 from the float64 reference: same, same, then same" in output.err


def _one_filter(folder: Path) -> Path:
    path = folder / "filters.json"
    path.write_text('{"same": [[1]]}', encoding="utf-8")
    return path
