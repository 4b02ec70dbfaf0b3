import pytest

from omni_proxy.cli.completion.command import SHELLS, pages


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("bash") / "omni-proxy"
    path.write_text(SHELLS["bash"](pages()))
    return path
