"""The server answers only this machine, only with the token, and only the page itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from stepscope.errors import UsageError
from stepscope.view.documents import Documents, NoDocument
from stepscope.view.server import Door, application, is_loopback, listening

DOOR = Door("127.0.0.1", 8765, "the-token")
OWN = {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "same-origin"}
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def made(name: str, options: Mapping[str, str]) -> Any:
    match name:
        case "names":
            return {"name": HOSTILE, "long": "x" * 10_000_000}
        case "options" | "capture":
            return dict(options)
        case "mistake":
            raise UsageError("name a device")
        case "bug":
            raise ZeroDivisionError
    raise NoDocument("there is none")


def no_options(name: str) -> tuple[str, ...]:
    return ()


@pytest.fixture
def client() -> TestClient:
    documents = Documents(made, lambda error: f"a bug ({type(error).__name__})", lambda _: ("a",))
    return TestClient(application(documents, DOOR), "http://127.0.0.1:8765", follow_redirects=False)


@pytest.fixture
def known(client: TestClient) -> TestClient:
    client.get("/?token=the-token")
    return client


def test_without_the_token_nothing_is_answered(client: TestClient) -> None:
    assert {client.get(path).status_code for path in ("/", "/page.js", "/api/names", "/?token=wrong")} == {403}


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(client: TestClient) -> None:
    answer = client.get("/?token=the-token")
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "8765" in cookie.partition("=")[0]
    assert client.get("/").status_code == 200


def test_the_token_opens_nothing_but_the_page(client: TestClient) -> None:
    assert client.get("/api/names?token=the-token").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "10.0.0.1", "", "[::1"])
def test_other_names_of_the_machine_are_refused(known: TestClient, host: str) -> None:
    assert known.get("/api/options", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]:9000"])
def test_a_tunnel_may_have_another_port(host: str) -> None:
    assert DOOR.is_named(host)


def test_a_remote_host_has_no_name_that_a_site_could_choose() -> None:
    door = Door("0.0.0.0", 8765)
    assert door.is_named("10.1.2.3:8765")
    assert not door.is_named("evil.example:8765")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_pages_of_other_sites_are_refused(known: TestClient, headers: dict[str, str]) -> None:
    assert known.get("/api/options", headers=headers).status_code == 403


def test_every_answer_has_the_headers(client: TestClient) -> None:
    for answer in (client.get("/"), client.get("/?token=the-token"), client.get("/"), client.get("/api/bug")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers


def test_the_page_has_no_inline_script(known: TestClient) -> None:
    page = known.get("/").text
    assert page.count("<script") == page.count('<script src="page.js"></script>') == 1
    assert known.get("/page.js").headers["content-type"].startswith("text/javascript")
    assert known.get("/page.css").headers["content-type"].startswith("text/css")


def test_an_editor_takes_the_page_in_one_file(client: TestClient) -> None:
    assert client.get("/frame").status_code == 403
    client.get("/?token=the-token")
    page = client.get("/frame").text
    assert 'src="' not in page
    assert "default-src 'none'" in page


def test_hostile_names_and_long_ones_are_data(known: TestClient) -> None:
    answer = known.get("/api/names")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"name": HOSTILE, "long": "x" * 10_000_000}
    assert "\u202e" not in answer.text


@pytest.mark.parametrize(("name", "status"), [("mistake", 422), ("none", 404), ("bug", 500)])
def test_errors_are_one_sentence_and_end_nothing(known: TestClient, name: str, status: int) -> None:
    answer = known.get(f"/api/{name}")
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert known.get("/api/options?a=1").json() == {"a": "1"}


def test_what_does_something_is_asked_for_by_the_page_only(client: TestClient) -> None:
    assert client.post("/api/capture", headers=OWN).status_code == 403  # without the token
    client.get("/?token=the-token")
    assert client.get("/api/capture", headers=OWN).status_code == 405
    elsewhere: list[dict[str, str]] = [
        {},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {**OWN, "sec-fetch-site": "same-site"},
    ]
    assert {client.post("/api/capture?a=1", headers=headers).status_code for headers in elsewhere} == {403}
    assert client.post("/api/capture?a=1", headers=OWN).json() == {"a": "1"}


def test_nothing_else_is_served(known: TestClient) -> None:
    for path in ("/etc/passwd", "/../pyproject.toml", "/api/../page.js/x", "/page.js.map", "/api/"):
        assert known.get(path).status_code == 404
    assert known.post("/api/options", headers=OWN).status_code == 405
    assert known.get(f"/api/options?x={'y' * 9000}").status_code == 414


def test_two_requests_for_a_document_make_it_once() -> None:
    begun, go_on, times = threading.Event(), threading.Event(), []

    def make(name: str, options: Mapping[str, str]) -> str:
        times.append(name)
        begun.set()
        go_on.wait(60)
        return name

    documents = Documents(make, str, no_options)
    first = documents.ask("diagnosis", {})
    assert begun.wait(60)
    second = documents.ask("diagnosis", {})
    go_on.set()
    assert first.result(60) is second.result(60) is documents.ask("diagnosis", {}).result(60)
    assert times == ["diagnosis"]


class Held:
    """Makes documents one by one, each when it is let go."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, name: str, options: Mapping[str, str]) -> str:
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        self.made.append(name + "".join(options.values()))
        return name


@pytest.mark.parametrize("long", ["plan", "ranks", "diagnosis", "whatif"])
def test_what_is_quick_waits_for_nothing_long(long: str) -> None:
    held = Held()
    documents = Documents(lambda name, options: held(name, options) if name == long else name, str, no_options)
    waits = documents.ask(long, {})
    assert held.begun.acquire(timeout=60)
    for name in ("timeline", "stretch", "session"):
        assert documents.ask(name, {}).result(60).status == 200
    assert not waits.done()
    held.go_on.release()
    assert waits.result(60).status == 200


def test_what_nobody_waits_for_any_more_is_not_made() -> None:
    held = Held()
    documents = Documents(held, str, lambda _: ("batch",))
    first, *others = (documents.ask("plan", {"batch": batch}) for batch in ("1", "2", "3", "3", "4"))
    assert held.begun.acquire(timeout=60)
    assert not first.cancel()  # it has begun
    assert others[0].cancel()
    assert others[1].cancel()  # another still waits for the same
    held.go_on.release(3)
    assert {each.result(60).status for each in (first, *others[2:])} == {200}
    assert held.made == ["plan1", "plan3", "plan4"]
    held.go_on.release()
    assert documents.ask("plan", {"batch": "2"}).result(60).status == 200
    assert held.made[-1] == "plan2"


def test_a_client_that_leaves_takes_its_question_back() -> None:
    held = Held()
    documents = Documents(held, str, lambda _: ("batch",))
    documents.ask("plan", {"batch": "1"})
    assert held.begun.acquire(timeout=60)
    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/plan",
        "query_string": b"batch=2",
        "headers": [(b"host", b"127.0.0.1:8765"), (b"cookie", f"{DOOR.cookie}=the-token".encode())],
    }

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    async def ask() -> None:
        await application(documents, DOOR)(scope, receive, send)

    asyncio.run(ask())
    last = documents.ask("plan", {"batch": "3"})
    held.go_on.release(2)
    assert last.result(60).status == 200
    assert held.made == ["plan1", "plan3"]


def test_unknown_options_make_no_other_document() -> None:
    times: list[dict[str, str]] = []
    documents = Documents(lambda name, options: times.append(dict(options)), str, lambda _: ("group_by",))
    for options in ({"group_by": "name"}, {"cache": "1", "group_by": "name"}, {"group_by": "name", "x": "y" * 5000}):
        documents.ask("idle", options).result(60)
    assert times == [{"group_by": "name"}]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[str] = []

    def make(name: str, options: Mapping[str, str]) -> str:
        times.append(options["row"])
        return "x" * 400

    documents = Documents(make, str, lambda _: ("row",))
    monkeypatch.setattr("stepscope.view.documents.MOST_BYTES", 1000)
    for row in ("1", "2", "1", "3", "1", "2", "1"):
        documents.ask("slice", {"row": row}).result(60)
    assert times == ["1", "2", "3", "2"]


def test_what_changes_is_made_anew() -> None:
    times: list[str] = []
    documents = Documents(lambda name, options: times.append(name), str, no_options)
    for _ in range(2):
        documents.ask("runs", {}).result(60)
    assert times == ["runs", "runs"]


def test_the_next_free_port_unless_one_is_named() -> None:
    with listening("127.0.0.1", None) as first, listening("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listening("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


class Rewritten:
    """A trace that may be written again while it is shown."""

    def __init__(self) -> None:
        self.written = self.read = 1

    def make(self, name: str, options: Mapping[str, str]) -> int:
        return self.read

    def is_changed(self) -> bool:
        return self.written != self.read

    def renew(self) -> bool:
        was_changed, self.read = self.is_changed(), self.written
        return was_changed


def test_a_file_that_changed_is_told_and_read_again_with_the_page() -> None:
    trace = Rewritten()
    documents = Documents(trace.make, str, no_options)
    client = TestClient(application(documents, DOOR, shown=trace), "http://127.0.0.1:8765")
    client.get("/?token=the-token")

    def asked() -> tuple[int, bool]:
        answer = client.get("/api/diagnosis")
        return answer.json(), "stepscope-changed" in answer.headers

    assert asked() == (1, False)
    trace.written = 2
    assert asked() == (1, True)  # what the page has goes together until it is loaded again
    client.get("/")
    assert asked() == (2, False)


def test_what_was_being_made_of_a_changed_file_is_not_kept() -> None:
    held = Held()
    documents = Documents(held, str, no_options)
    old = documents.ask("diagnosis", {})
    assert held.begun.acquire(timeout=60)
    documents.forget()
    new = documents.ask("diagnosis", {})
    held.go_on.release(2)
    assert old.result(60) is not new.result(60)
    assert documents.ask("diagnosis", {}).result(60) is new.result(60)
    assert held.made == ["diagnosis", "diagnosis"]


def test_documents_that_are_gone_leave_no_thread_behind() -> None:
    before = set(threading.enumerate())
    documents = Documents(lambda name, options: name, str, no_options)
    assert documents.ask("steps", {}).result(10).body == b'"steps"'
    own = set(threading.enumerate()) - before
    del documents
    for each in own:
        each.join(10)
        assert not each.is_alive()
