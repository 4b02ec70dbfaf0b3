import pytest

from omni_proxy.replica.models.chat_template import ChatTemplate, ChatTemplateError

SOURCE = """{% for message in messages %}
    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ bos_token }}{{ message['role'] }}: {{ message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}"""
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <b>"}]


def test_messages_are_rendered_in_order_and_not_escaped():
    template = ChatTemplate(SOURCE, bos_token="[", eos_token="]")
    assert template.render(MESSAGES) == "[system: Be kind.]\n[user: Hi <b>]\nassistant:\n"
    assert template.render(MESSAGES, add_generation_prompt=False).endswith("Hi <b>]\n")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "content": "4"}], "rejects the messages: no tools here"),
        ([{"role": "user", "content": None}], "fails on these messages: unsupported operand"),
        ([{"role": "user"}], "fails on these messages"),
    ],
)
def test_messages_that_a_template_cannot_render_are_refused_with_the_reason(messages, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(SOURCE).render(messages)


def test_an_invalid_template_is_refused_when_it_is_loaded():
    with pytest.raises(ChatTemplateError, match=r"chat template is invalid: .*endfor"):
        ChatTemplate("{% for m in messages %}")


def test_a_template_cannot_leave_its_sandbox():
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(MESSAGES)
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}").render(MESSAGES)
