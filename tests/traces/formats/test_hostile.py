"""What tests/fuzz does for hours, for a moment in every run: windows with spoiled rows and tampered forms."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent


def load_module(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


forms, hostile = load_module("forms"), load_module("hostile")


class Choices:
    """hypothesis behind atheris's interface."""

    def __init__(self, data):
        self.data = data

    def ConsumeIntInRange(self, least, most):
        return self.data.draw(st.integers(least, most))

    def ConsumeBool(self):
        return self.data.draw(st.booleans())

    def ConsumeInt(self, num_bytes):
        return self.data.draw(st.integers(-(2 ** (8 * num_bytes - 1)), 2 ** (8 * num_bytes - 1) - 1))

    def ConsumeBytes(self, size):
        return self.data.draw(st.binary(max_size=size))

    def ConsumeUnicodeNoSurrogates(self, size):
        return self.data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=size))


@pytest.mark.parametrize("form", forms.NAMES)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=30)
@given(st.data())
def test_an_import_ends_in_a_right_batch_or_a_routepack_error(form, data):
    hostile.one_input(form)(Choices(data))
