"""The rules of what comes over a network: where requests go, when they are made again, and how."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.web_server import WebServer, status
from loadkit import network
from loadkit.errors import DownloadError, LoadkitError, NotInstalledError
from loadkit.network import make_client, patience
from loadkit.network.addresses import check_reached, next_address, origin_of, without_user
from loadkit.network.answers import Transient
from loadkit.network.http_client import HttpClient, Reply
from loadkit.network.patience import Deadline, Retries, retry_after

FILE = "weights.safetensors"
DATA = bytes(range(256)) * 40


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / FILE).write_bytes(DATA)
    with WebServer(tmp_path) as server:
        yield server


@pytest.fixture
def client() -> Iterator[HttpClient]:
    made = make_client(2.0)
    yield made
    made.close()


def content(client: HttpClient, url: str, **more: Any) -> bytes:
    with client.open(FILE, url, Deadline(5.0), **more) as reply:
        assert reply.status == 200
        return reply.content(len(DATA))


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("http://a b/", "http://a\r\nHost: x/", "http:///x", "x", "http://\u0430/", "ftp://h/"),
        *("http://h:99999/", "http://[::1/"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(DownloadError, match="no http or https address") as caught:
        origin_of(url)
    assert str(caught.value).isascii() and str(caught.value).isprintable()


def test_an_address_is_sent_without_its_user() -> None:
    for rest in ("h", "h:80/x@y?z@", "h?x=a@b", "[::1]/@"):
        for user in ("", "u@", "u:p@q@"):
            assert without_user(f"http://{user}{rest}") == f"http://{rest}"


def test_an_origin_is_scheme_host_and_port() -> None:
    assert origin_of("https://HOST/x?y") == ("https", "host", 443)
    assert origin_of("http://user:pw@host:8080") == ("http", "host", 8080)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        (None, "no address"),
        ("", "no address"),
        ("http://h:99999/", "no address"),
        ("http://[::1", "no address"),
        ("http://h/\x7f", "no address"),
        ("http://h/\u0430", "no address"),
        ("/" + "x" * 20_000, "no address"),
        ("file:///etc/passwd", "only http"),
        ("gopher://h/", "only http"),
        ("http://hub/x", "from https"),
        ("https://user:hunter2@hub/x", "credentials"),
    ],
)
def test_W03_a_redirect_that_is_not_followed(location: str | None, says: str) -> None:
    with pytest.raises(DownloadError, match=says) as caught:
        next_address(FILE, "https://hub/x", location)
    assert caught.value.file == FILE and "hunter2" not in str(caught.value)


def test_a_redirect_is_taken_relative_to_where_it_was_told() -> None:
    assert next_address(FILE, "http://hub/a/b", "../c?d#e") == "http://hub/c?d"
    assert next_address(FILE, "https://hub/a", "/y") == "https://hub/y"
    assert next_address(FILE, "http://hub/a", "https://cdn/y") == "https://cdn/y"


@pytest.mark.parametrize(
    ("address", "first", "may"),
    [
        ("93.184.216.34", "93.184.216.35", True),  # out into the world
        ("169.254.169.254", "93.184.216.35", False),
        ("169.254.169.254", "127.0.0.1", False),
        ("::ffff:169.254.169.254", "127.0.0.1", False),
        ("fe80::1", "93.184.216.35", False),
        ("224.0.0.1", "93.184.216.35", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("0.0.0.0", "10.0.0.8", False),
        ("127.0.0.1", "93.184.216.35", False),
        ("::1", "127.0.0.1", True),
        ("10.0.0.7", "93.184.216.35", False),
        ("10.0.0.7", "10.0.0.8", True),  # a mirror inside a network
        ("10.0.0.7", "127.0.0.1", False),
    ],
)
def test_W03_a_redirect_does_not_lead_into_a_network(address: str, first: str, may: bool) -> None:
    found, origin = ipaddress.ip_address(address), ("https", first, 443)
    check_reached(FILE, found, "cdn.example", ("https", "CDN.example".lower(), 443))  # the same
    if may:
        check_reached(FILE, found, "cdn.example", origin)
        return
    with pytest.raises(DownloadError, match="inside a network"):
        check_reached(FILE, found, "cdn.example", origin)


# -- connections ---------------------------------------------------------------------------------


def _resolve(monkeypatch: pytest.MonkeyPatch, host: str, *answers: str) -> list[str]:
    """A name leads to one address after the other, and then stays with the last."""
    real, left = socket.getaddrinfo, list(answers)

    def resolve(name: Any, port: Any, *args: Any, **options: Any) -> Any:
        if name != host:
            return real(name, port, *args, **options)
        given = left.pop(0) if len(left) > 1 else left[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (given, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return left


def test_W03_a_redirect_from_elsewhere_does_not_reach_this_machine(
    web: WebServer, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _resolve(monkeypatch, "origin.test", "93.184.216.35")
    url, away = f"{web.url}/{FILE}", {"led_from": "http://origin.test/x"}
    with pytest.raises(DownloadError, match="not followed") as caught:
        content(client, url, **away)
    assert caught.value.file == FILE and web.requests == []
    assert content(client, url) == DATA  # who asked for it himself has it
    with pytest.raises(DownloadError, match="not followed"):  # nor by the connection that is kept
        content(client, url, **away)
    assert len(web.requests) == 1
    assert content(client, url, led_from=f"{web.url}/other") == DATA


def test_W03_a_name_that_leads_elsewhere_when_it_is_looked_up_again_is_asked_nothing(
    web: WebServer, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = _resolve(monkeypatch, "cdn.test", "93.184.216.34", "127.0.0.1")
    _resolve(monkeypatch, "origin.test", "93.184.216.35")
    url = web.url.replace("127.0.0.1", "cdn.test")
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1, an address inside a network"):
        content(client, f"{url}/{FILE}", led_from="http://origin.test/x")
    assert left == ["127.0.0.1"] and web.requests == []


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_proxy_is_asked_and_told_its_user_and_nothing_of_an_origins(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    url = f"http://far.test/{FILE}"
    monkeypatch.setenv("http_proxy", f"{scheme}user:p%40ss@{web.url.removeprefix('http://')}")
    client = make_client(2.0, {origin_of("http://other.test/"): {"Authorization": "secret"}})
    assert content(client, url) == DATA  # far.test has no address: the proxy would know it
    assert content(client, url, led_from="http://origin.test/x") == DATA
    assert content(client, url.replace("far", "me:hunter2@far")) == DATA
    client.close()
    sent = [(each.headers["proxy-authorization"], each.headers["host"]) for each in web.requests]
    assert sent == [("Basic dXNlcjpwQHNz", "far.test")] * 3
    assert {each.line for each in web.requests} == {f"GET {url} HTTP/1.1"}
    assert not any("authorization" in each.headers for each in web.requests)
    monkeypatch.setenv("no_proxy", "far.test")
    with pytest.raises(Transient, match="cannot be reached"):
        content(make_client(2.0), url)


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """A server whose certificate nobody knows; it answers nobody who goes on all the same."""
    where = str(tmp_path / "pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", where, "-out", f"{where}.crt"], check=True,
                   capture_output=True)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{where}.crt", where)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with taken, pytest.raises(OSError):
                context.wrap_socket(taken, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}/x"
        thread.join()


def test_a_certificate_that_is_not_trusted_is_refused_at_once(
    untrusted: str, client: HttpClient
) -> None:
    with pytest.raises(DownloadError, match="certificate verify failed") as caught:
        content(client, untrusted)
    assert caught.value.code == "E_OFFLINE" and "SSL_CERT_FILE" in str(caught.value)


def test_a_server_that_speaks_no_tls_is_not_reached(web: WebServer, client: HttpClient) -> None:
    with pytest.raises(Transient, match="cannot be reached safely") as caught:
        content(client, web.url.replace("http:", "https:"))
    assert caught.value.unreached and web.requests == []


def test_a_small_answer_is_asked_for_again_and_has_a_limit(
    web: WebServer, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.001)

    def refused(reply: Reply) -> LoadkitError:
        return DownloadError(f"no: {reply.status}")

    def get(limit: int) -> bytes:
        retries = Retries("the listing", None, Deadline(5.0))
        return client.content(f"{web.url}/{FILE}", limit, retries, refused)[0]

    web.queue(status(503), status(500), lambda handler: handler.serve(most=100))
    assert get(len(DATA)) == DATA and len(web.requests) == 4
    with pytest.raises(DownloadError, match=f"more than {len(DATA) - 1} bytes"):
        get(len(DATA) - 1)
    web.queue(status(418))
    with pytest.raises(DownloadError, match="no: 418"):
        get(len(DATA))


def test_without_the_library_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match="urllib3") as caught:
        make_client(1.0)
    assert caught.value.hint == 'pip install "loadkit-core[http]"'


def test_the_library_is_imported_with_the_first_client_and_not_before() -> None:
    modules = ["loadkit.cli", "loadkit.network.http_transport", "loadkit.network.remote_file"]
    code = f"import sys, loadkit, {', '.join(modules)}\n"
    code += "print('urllib3' in sys.modules)\nloadkit.network.make_client(1.0)\n"
    code += "print('urllib3' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


# -- patience ------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def retries(clock: Clock, seconds: float = 100.0) -> Retries:
    return Retries("x", FILE, Deadline(seconds, clock), clock.sleep)


def keep_failing(held: Retries, error: Transient) -> None:
    """Fail until it is enough."""
    for _ in range(1000):
        held.failed(error, 7)


def test_fault_19_bytes_that_arrive_move_a_deadline_on() -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock)
    clock.now = 9.0
    deadline.arrived(5 * patience.MIN_RATE)
    assert deadline.left() == 6.0
    clock.now = 20.0
    assert deadline.left() == 0.0


def test_fault_20_retry_after_is_waited_for_and_held_against_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    held = retries(clock, 10.0)
    held.failed(Transient("busy", retry_after=3.0))
    assert clock.waits == [3.0] and "attempt 1 failed: busy; again in 3.0 s" in caplog.text
    with pytest.raises(DownloadError, match="asks to wait 60 s") as caught:
        held.failed(Transient("busy", retry_after=60.0))
    assert caught.value.code == "E_TIMEOUT" and clock.waits == [3.0]


def test_waits_grow_to_a_limit_and_begin_anew_when_bytes_arrive() -> None:
    clock = Clock()
    held = retries(clock)
    for _ in range(patience.MAX_ATTEMPTS - 1):
        held.failed(Transient("cut", retry_after=0.0))
    most = [min(patience.LONGEST_WAIT, patience.FIRST_WAIT * 2**at) for at in range(9)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(clock.waits, most, strict=True))
    held.progressed(1)
    held.failed(Transient("cut"))
    assert clock.waits[-1] <= patience.FIRST_WAIT


@pytest.mark.parametrize(
    ("error", "times", "code"),
    [
        (Transient("cut"), patience.MAX_ATTEMPTS, "E_DOWNLOAD"),
        (Transient("x", status=500, retry_after=1.0), patience.MAX_ATTEMPTS, "E_DOWNLOAD"),
        (Transient("no route", unreached=True), patience.MAX_UNREACHED, "E_OFFLINE"),
    ],
    ids=["cut", "broken", "unreached"],
)
def test_failures_without_a_byte_are_counted(error: Transient, times: int, code: str) -> None:
    clock = Clock()
    held = retries(clock, 1e6)
    with pytest.raises(DownloadError, match=f"failed {times} times") as caught:
        keep_failing(held, error)
    assert len(clock.waits) == times - 1
    found = caught.value
    assert (found.code, found.file, found.offset) == (code, FILE, 7)
    assert found.detail == {"attempts": times, "status": error.status}


@pytest.mark.parametrize("later", [429, 503])
def test_fault_20_a_server_that_says_later_is_waited_for_until_the_deadline(later: int) -> None:
    clock = Clock()
    held = retries(clock, 300.0)
    with pytest.raises(DownloadError, match="not done within 300") as caught:
        keep_failing(held, Transient("busy", status=later))
    assert caught.value.code == "E_TIMEOUT"
    assert len(clock.waits) > patience.MAX_ATTEMPTS and 270 < sum(clock.waits) < 300


def test_fault_20_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after({"Retry-After": "17"}) == 17
    date = {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert retry_after(date, now=1445412470) == 10
    assert retry_after(date) == 0
    later = retry_after({"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"})
    assert later is not None and later > 1e9
    for said in ("", "soon", "-1", "1e9", "99999999999999", "\u0661"):
        assert retry_after({"Retry-After": said}) is None
    assert retry_after({}) is None
