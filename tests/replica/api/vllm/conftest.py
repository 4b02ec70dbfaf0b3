import pytest

from tests.replica.api.api_fixture import TINY, opened


@pytest.fixture
async def engine():
    """The tiny model behind vLLM's routes only."""
    async with opened(TINY, dialect="vllm", tokenizer_model="tiny", model_name="tiny") as world:
        yield world
