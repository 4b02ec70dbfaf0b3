import pytest

from omni_proxy.config.parse import ConfigError, parse

OWNED = '[routing]\nvoice_owner = "http://A:80"\n[[workers]]\nurl = "http://a:80/"\n'


def test_a_voice_owner_is_found_in_any_spelling_and_may_be_no_worker_of_the_file():
    assert parse(OWNED).routing.voice_owner == "http://a:80"
    assert parse('routing.voice_owner = "http://b:1"').routing.voice_owner == "http://b:1"


def test_a_voice_owner_that_could_keep_no_voices_is_refused():
    with pytest.raises(ConfigError, match="a:80 lacks audio_input, which keeping voices needs"):
        parse(OWNED + 'capabilities = ["chat", "speech"]\n')
