import re
from html.parser import HTMLParser

import pytest

from omni_proxy.admin_api.routes.monitoring.dashboard_routes import (
    content_security_policy,
    dashboard_page,
)
from tests.admin_api.api_fixture import A, build_api, entry

PAGE = dashboard_page()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.fixture
def tags():
    parser = Tags()
    parser.feed(PAGE)
    return parser.found


def rules(response):
    policy = response.headers["Content-Security-Policy"]
    return dict(rule.strip().split(" ", 1) for rule in policy.split(";"))


async def test_the_page_is_served_whole(api):
    response = await api.client().get("/dashboard")
    assert response.status_code == 200
    assert response.content_type == "text/html; charset=utf-8"
    assert await response.get_data(as_text=True) == PAGE


async def test_the_page_needs_no_key_and_contains_no_data():
    api = build_api(entry(A, model="secret-model"), key="hunter2")
    response = await api.client().get("/dashboard")
    assert (response.status_code, await response.get_data(as_text=True)) == (200, PAGE)


async def test_the_csp_allows_inline_code_and_this_api_only(api):
    policy = rules(await api.client().get("/dashboard"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
    assert "unsafe" not in str(policy)
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_another_script_has_another_hash():
    first, second = (
        content_security_policy(f"<style>a</style><script>{text}</script>") for text in ("1", "2")
    )
    assert first != second


async def test_the_page_forbids_framing_sniffing_and_caching(api):
    headers = (await api.client().get("/dashboard")).headers
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


async def test_an_unchanged_page_is_not_sent_again(api):
    client = api.client()
    tag = (await client.get("/dashboard")).headers["ETag"]
    again = await client.get("/dashboard", headers={"If-None-Match": tag})
    assert (again.status_code, await again.get_data()) == (304, b"")
    assert (await client.get("/dashboard", headers={"If-None-Match": '"x"'})).status_code == 200


def test_the_page_has_no_url_of_another_host():
    namespaces = {"http://www.w3.org/2000/svg"}
    examples = {"http://10.0.0.7:8000", "http://${typed}"}  # a placeholder, and the user's input
    urls = set(re.findall(r"https?://[^\s\"'`)<>]+", PAGE))
    assert urls - namespaces - examples <= {"https?:"}
    assert "@import" not in PAGE
    assert "url(" not in PAGE


def test_the_page_loads_nothing_from_elsewhere(tags):
    for tag, attributes in tags:
        assert not {"src", "srcset", "action", "ping"} & attributes.keys(), tag
        target = attributes.get("href", "#")
        assert target.startswith(("#", "data:")), target


def test_the_page_has_no_inline_styles_or_event_handlers(tags):
    for tag, attributes in tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert len([tag for tag, _ in tags if tag in ("script", "style")]) == 2


def test_no_script_writes_markup():
    sinks = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(")
    assert [sink for sink in sinks if sink in PAGE] == []


def test_the_key_is_stored_for_this_tab_only():
    assert "sessionStorage" in PAGE
    assert [name for name in ("localStorage", "document.cookie", "indexedDB") if name in PAGE] == []


def test_every_input_field_has_a_label(tags):
    labelled = set(re.findall(r'<label[^>]*>(?:(?!</label>).)*?id="([\w-]+)"', PAGE))
    for tag, attributes in tags:
        if tag in ("input", "select", "textarea") and attributes["id"] not in labelled:
            assert attributes.get("aria-label"), attributes


@pytest.mark.parametrize(
    ("accept", "status"),
    [("text/html,application/xhtml+xml,*/*;q=0.8", 302), ("*/*", 404), ("application/json", 404)],
)
async def test_the_root_redirects_a_browser_to_the_dashboard_and_is_a_404_to_programs(
    api, accept, status
):
    response = await api.client().get("/", headers={"Accept": accept})
    assert response.status_code == status
    if status == 302:
        assert response.headers["Location"].endswith("dashboard")
    else:
        assert (await response.get_json())["error"]["code"] == "not_found"
