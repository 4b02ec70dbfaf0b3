import subprocess
import sys

import pytest

import omni_proxy.replica as replica


def test_public_names_are_importable():
    assert replica.Client.__module__ == "omni_proxy.replica.pipeline.client"
    assert replica.PipelineConfig(name="x").name == "x"
    assert callable(replica.launch_server)
    assert callable(replica.create_app)


def test_another_name_is_none():
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = replica.Clint


def test_the_name_alone_and_its_arguments_cost_no_web_server_and_no_model_runtime():
    code = (
        "import sys, omni_proxy.replica, omni_proxy.replica.command; "
        "print(*sorted({'torch', 'numpy', 'quart', 'trio', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
