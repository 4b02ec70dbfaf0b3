import subprocess
import sys

import pytest

import omni_proxy.replica as replica


def test_public_names_are_importable():
    assert replica.Client.__module__ == "omni_proxy.replica.pipeline.client"
    assert replica.PipelineConfig(name="x").name == "x"
    assert callable(replica.launch_server)
    assert callable(replica.create_app)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = replica.Clint


def test_importing_the_package_and_the_command_imports_no_web_server_or_model_runtime():
    code = (
        "import sys, omni_proxy.replica, omni_proxy.replica.replica_command; "
        "print(*sorted({'torch', 'numpy', 'quart', 'trio', 'jinja2'} & sys.modules.keys()))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == ""
