"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc, unused-ignore]  # Django has no types
    initial = True
    operations = (
        migrations.CreateModel(
            "Order",
            [("id", models.BigAutoField(primary_key=True, serialize=False)), ("number", models.IntegerField(unique=True))],
        ),
    )
