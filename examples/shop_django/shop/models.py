"""The shop's orders."""

from django.db import models


class Order(models.Model):  # type: ignore[misc, unused-ignore]  # Django has no types
    number = models.IntegerField(unique=True)
