"""A Flask application whose orders and tasks commit together: see README.md beside this file."""

import os
from pathlib import Path

from celery import Celery
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from millstream import Handlers, Installation, Millstream
from millstream.flask import MillstreamFlask

DATABASE = f"sqlite:///{Path('data/millstream.db').absolute()}"
flask = Flask(__name__)
flask.config["SQLALCHEMY_DATABASE_URI"] = DATABASE
db = SQLAlchemy(flask)
app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"))
handlers = Handlers()
millstream = Millstream(app, Installation.local("data"), celery_app="shop:app", handlers="shop:handlers")
MillstreamFlask(flask, handlers, millstream=millstream)


class Order(db.Model):  # type: ignore[name-defined, misc, unused-ignore]  # made by the extension
    id = db.Column(db.Integer, primary_key=True)


@handlers.task(name="confirm", effects="idempotent")
def confirm(order: int) -> str:
    return f"order {order} is confirmed"


@flask.post("/orders/<int:number>")
def order(number: int) -> str:
    """The order and its task, or neither."""
    db.session.add(Order(id=number))
    result = confirm.delay(number)
    db.session.commit()
    return f"{result.id}\n"


with flask.app_context():
    Path("data").mkdir(exist_ok=True)
    db.create_all()
