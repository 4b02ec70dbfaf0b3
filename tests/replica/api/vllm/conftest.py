import pytest

from tests.replica.api.api_fixture import TINY, opened


@pytest.fixture
async def engine():
    """The API of the tiny model with vLLM's routes only."""
    async with opened(TINY, dialect="vllm", tokenizer_model="tiny", model_name="tiny") as api:
        yield api
