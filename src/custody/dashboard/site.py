"""Answers the requests below `/ui`: finds the page, checks who asks, and turns every error into a page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from custody.dashboard import assets
from custody.dashboard.pages import PAGES, Handler
from custody.dashboard.rendering import render
from custody.dashboard.reply import Download, Moved, Page, Reply
from custody.dashboard.sessions import Sessions
from custody.dashboard.visit import Visit
from custody.dashboard.watch import Watch
from custody.errors import (
    Forbidden,
    InvalidArgument,
    MethodNotAllowed,
    NoSuchPath,
    Unauthorized,
)
from custody.http.answer import Answer
from custody.http.asgi import Receive, Scope
from custody.http.body import Body
from custody.http.dispatch import failed
from custody.http.origins import require_host
from custody.http.rights import ANYBODY, Caller
from custody.http.state import ServerState

ROOT = "/ui"
LOGIN, LOGOUT = "/ui/login", "/ui/logout"
MOST_FIELDS = 20_000
"""Most fields of a form: each chosen dead letter is one."""
HTML = b"text/html; charset=utf-8"
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

Fields = Mapping[str, list[str]]


class Dashboard:
    """The pages of one server. Used in its event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._watch = Watch(state)
        self._sessions = Sessions(secure=state.settings.tls_cert is not None)
        self._routes = [(method, path, _pattern(path), handler) for method, path, handler in PAGES]

    def close(self) -> None:
        """Stops what goes on between requests, when the server stops."""
        self._watch.close()

    async def answer(self, scope: Scope, receive: Receive, headers: Mapping[bytes, bytes], request_id: str) -> Answered:
        """The answer to a request below /ui, and what the server's log says of it."""
        answered = Answered(request_id)
        path, method = scope["path"], scope["method"]
        asset = assets.find(path) if method == "GET" else None
        if asset is not None:
            answered.route, answered.lasting = "/ui/assets/{name}", True
            answered.answer = Answer(asset.body, 200, (*HEADERS, assets.LASTING), asset.content_type)
            return answered
        query_string = scope["query_string"].decode("latin-1")
        here = path + (f"?{query_string}" if query_string else "")
        try:
            reply = await self._reply(scope, receive, headers, _fields(query_string), answered)
            # in a thread, because it takes some milliseconds with hundreds of groups
            answered.answer = await asyncio.to_thread(_answer, reply, self._common(answered.caller, here))
        except Exception as error:
            reply = self._refused(error, headers, here, answered)
            answered.answer = _answer(reply, self._common(answered.caller, here))
        return answered

    async def _reply(
        self, scope: Scope, receive: Receive, headers: Mapping[bytes, bytes], query: Fields, answered: Answered
    ) -> Reply:
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "POST"):
            raise MethodNotAllowed(f"{method} is not for {path}")
        if not self._state.keys.needed:
            require_host(headers, self._state.settings)
        if method == "POST":
            require_own_page(headers)
        if path in (LOGIN, LOGOUT):
            answered.route = path
            form = await self._form(receive, headers, scope) if method == "POST" else {}
            return await self._login(method, path, headers, query, form)
        answered.caller = await self._caller(headers)
        scope["custody.connection"].trust()
        handler, params = self._find(method, path, answered)
        form = await self._form(receive, headers, scope) if method == "POST" else {}
        visit = Visit(
            self._state,
            self._watch,
            caller=answered.caller,
            worker="dashboard" if answered.caller.name is None else f"{answered.caller.name}/dashboard",
            params=params,
            query=query,
            form=form,
        )
        return await handler(visit)

    def _find(self, method: str, path: str, answered: Answered) -> tuple[Handler, dict[str, str]]:
        known = False
        for of, route, pattern, handler in self._routes:
            if found := pattern.fullmatch(path):
                known, answered.route = True, route
                if of == method:
                    return handler, found.groupdict()
        if known:
            raise MethodNotAllowed(f"{method} is not for {path}")
        raise NoSuchPath(f"there is no page {path}", "Start again at the overview.")

    async def _caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        key = self._sessions.key(headers)
        # the last known keys will do: the page should say that the database does not answer, and not ask for a login
        return await self._state.keys.caller(headers if key is None else {b"x-api-key": key}, stale=True)

    async def _login(
        self, method: str, path: str, headers: Mapping[bytes, bytes], query: Fields, form: Fields
    ) -> Reply:
        after = _own(next(iter(form.get("next", ()) or query.get("next", ())), ROOT))
        if path == LOGOUT:
            if method != "POST":
                raise MethodNotAllowed(f"{method} is not for {path}")
            return Moved(to=LOGIN, cookie=self._sessions.end(headers))
        if not self._state.keys.needed:
            return Moved(to=after)
        if method == "GET":
            return Page("login.html", {"next": after, "wrong": False})
        key = "".join(form.get("key", ())).strip().encode()
        try:
            await self._state.keys.caller({b"x-api-key": key})
        except Unauthorized:
            return Page("login.html", {"next": after, "wrong": True}, status=403)
        return Moved(to=after, cookie=self._sessions.begin(key))

    async def _form(self, receive: Receive, headers: Mapping[bytes, bytes], scope: Scope) -> Fields:
        if not headers.get(b"content-type", b"").startswith(b"application/x-www-form-urlencoded"):
            raise InvalidArgument("this is not the form of a page", "Use the dashboard, or the HTTP API.")
        body = Body(self._state, headers)
        try:
            return _fields((await body.read(receive, whole=scope["custody.connection"].whole)).decode())
        finally:
            body.release()

    def _refused(self, error: Exception, headers: Mapping[bytes, bytes], here: str, answered: Answered) -> Reply:
        if isinstance(error, Unauthorized):
            if b"hx-request" in headers:  # the page in the browser asks for an update: it has to be loaded as a whole
                return Moved(to=here, refresh=True)
            return Moved(to=f"{LOGIN}?next={quote(here, safe='')}")
        answer = failed(error, answered.request_id)
        said = msgspec.json.decode(answer.body)["error"]
        waits = answer.status == 503
        return Page("error.html", {"error": {"remedy": None, **said}, "waits": waits}, status=answer.status)

    def _common(self, caller: Caller, here: str) -> dict[str, Any]:
        """What every page shows."""
        return {
            "here": here,
            "caller": caller.name,
            "open": not self._state.keys.needed,
            "asset": assets.path_of,
        }


class Answered:
    """An answer, and what is noted of its request."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.answer = request_id, Answer()
        self.caller: Caller = ANYBODY
        self.route = "/ui"
        self.lasting = False
        """Whether browsers may keep it."""


def serves(path: str) -> bool:
    return path == ROOT or path.startswith("/ui/")


def wants_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks for a page: what programs send accepts anything, or JSON."""
    return b"text/html" in headers.get(b"accept", b"")


def require_own_page(headers: Mapping[bytes, bytes]) -> None:
    """Refuses a form that was not sent by a page of this server. Browsers say with each POST which page sends it.

    The scheme is not compared: a proxy may have removed TLS.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    try:
        own = bool(host) and urlsplit(origin).netloc == host
    except ValueError:  # such as a bracket that is not closed
        own = False
    if not own or headers.get(b"sec-fetch-site", b"same-origin") != b"same-origin":
        raise Forbidden("this form was not sent by a page of this server", "Open the dashboard, and send it again.")


def _answer(reply: Reply, common: Mapping[str, Any]) -> Answer:
    if isinstance(reply, Moved):
        if reply.refresh:
            return Answer(b"", 200, (*HEADERS, (b"hx-refresh", b"true")))
        cookie = () if reply.cookie is None else ((b"set-cookie", reply.cookie),)
        return Answer(b"", 303, (*HEADERS, (b"location", reply.to.encode()), *cookie))
    if isinstance(reply, Download):
        named = (b"content-disposition", f'attachment; filename="{reply.name}"'.encode())
        return Answer(reply.body, 200, (*HEADERS, named), reply.content_type)
    return Answer(render(reply.template, {**common, **reply.values}), reply.status, HEADERS, HTML)


def _fields(text: str) -> Fields:
    try:
        return parse_qs(text, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise InvalidArgument(f"a form has at most {MOST_FIELDS:,} fields", "Choose fewer.") from error


def _own(path: str) -> str:
    """A path of the dashboard: a link to the login must not lead to another site afterwards."""
    good = serves(path.partition("?")[0]) and path.isprintable() and path.isascii() and "\\" not in path
    return path if good else ROOT


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)))
