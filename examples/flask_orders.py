"""A Flask application that places orders: the order and its event are one transaction.

Run as a program it serves itself, places some orders, handles their events, and stops. Another process would handle
them: `custody work flask_orders:send_mail --topic flask-orders --group mail`. To serve others:
`flask --app flask_orders run`.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from flask import Flask, abort, request
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from werkzeug.serving import make_server

import custody

SCHEMA = "CREATE TABLE IF NOT EXISTS flask_orders (n serial PRIMARY KEY, customer text NOT NULL, amount int NOT NULL)"
TOPIC, GROUP = "flask-orders", "mail"
TRIED = [{"customer": "ann", "amount": 3}, {"customer": "bob", "amount": 0}, {"customer": "cy", "amount": 5}]
sent: list[str] = []
"""To whom this process has sent mails."""


def send_mail(message: custody.Message) -> None:
    print(f"mail to {message.payload['customer']}: {message.payload['amount']}", flush=True)
    sent.append(message.payload["customer"])


def create_app() -> Flask:
    app = Flask(__name__)
    c = app.extensions["custody"] = custody.connect()  # shared by all threads of the process
    c.ensure_topic(TOPIC, partitions=2)
    c.ensure_group(TOPIC, GROUP, custody.Policy(ordering="key", max_attempts=5))
    engine = app.extensions["engine"] = create_engine(
        c.database_url.replace("postgresql://", "postgresql+psycopg://", 1)
    )
    with engine.begin() as connection:
        connection.execute(text(SCHEMA))
    transaction = sessionmaker(engine).begin

    @app.post("/orders")
    def place() -> tuple[dict[str, int], int]:
        order = request.get_json()
        values = {"customer": str(order["customer"]), "amount": int(order["amount"])}
        with transaction() as session:
            insert = text("INSERT INTO flask_orders (customer, amount) VALUES (:customer, :amount) RETURNING n")
            number: int = session.execute(insert, values).scalar_one()
            custody.outbox.write(
                session, event_type="order-placed", payload=values, destination=TOPIC, ordering_key=values["customer"]
            )
            if values["amount"] <= 0:
                abort(409, "nothing was ordered")  # neither the order nor its event
        c.hint([TOPIC])  # the worker need not wait for its next poll
        return {"order": number}, 201

    @app.get("/mails")
    def mails() -> dict[str, int]:
        return {"sent": len(sent), "dead": c.stats(TOPIC, GROUP).dead}

    return app


def call(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, None


def main() -> None:
    app = create_app()
    server = make_server("127.0.0.1", 0, app, threaded=True)
    c: custody.Custody = app.extensions["custody"]
    worker = c.worker_for(TOPIC, GROUP, send_mail)
    threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=worker.run)]
    for thread in threads:
        thread.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        for order in TRIED:
            print(f"order of {order['customer']}: {call(url + '/orders', order)[0]}", flush=True)
        while (mails := call(url + "/mails")[1])["sent"] < 2:
            time.sleep(0.05)
        print(f"{mails['sent']} mails were sent, {mails['dead']} failed")
    finally:
        worker.stop()
        server.shutdown()
        for thread in threads:
            thread.join()
        app.extensions["engine"].dispose()
        c.close()


if __name__ == "__main__":
    main()
