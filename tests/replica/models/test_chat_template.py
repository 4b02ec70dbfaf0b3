import pytest

from omni_proxy.replica.models.chat_template import ChatTemplate, ChatTemplateError

SOURCE = """{% for message in messages %}
    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ bos_token }}{{ message['role'] }}: {{ message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}"""
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <b>"}]


def test_messages_are_written_one_after_another_and_left_as_they_are():
    template = ChatTemplate(SOURCE, bos_token="[", eos_token="]")
    assert template.render(ASKED) == "[system: Be kind.]\n[user: Hi <b>]\nassistant:\n"
    assert template.render(ASKED, add_generation_prompt=False).endswith("Hi <b>]\n")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "content": "4"}], "rejects the messages: no tools here"),
        ([{"role": "user", "content": None}], "fails on these messages: unsupported operand"),
        ([{"role": "user"}], "fails on these messages"),
    ],
)
def test_messages_it_cannot_write_are_refused_with_its_reason(messages, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(SOURCE).render(messages)


def test_a_broken_template_is_refused_at_once():
    with pytest.raises(ChatTemplateError, match=r"chat template is invalid: .*endfor"):
        ChatTemplate("{% for m in messages %}")


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(ASKED)
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}").render(ASKED)
