"""Warnings are errors in this suite, but those of plugins that a machine may have besides."""

import warnings

import pytest


def test_the_warning_of_pytest_benchmark_beside_xdist_is_no_error():
    warnings.warn(pytest.PytestWarning("Benchmarks are automatically disabled because xdist plugin is active."), stacklevel=1)


def test_control_any_other_warning_is_an_error():
    with pytest.raises(pytest.PytestWarning):
        warnings.warn(pytest.PytestWarning("Benchmarks are slow"), stacklevel=1)
