import pytest

from quire.ops.cpu import native


@pytest.fixture(autouse=True)
def torch_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears are torch's, which are the specification: these tests are about what is read."""
    monkeypatch.setattr(native, "unavailable", lambda: "not here")
