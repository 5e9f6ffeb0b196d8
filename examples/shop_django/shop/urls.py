"""One view: an order and its task, or neither."""

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import confirm


@csrf_exempt
@require_POST
def order(request: HttpRequest, number: int) -> HttpResponse:
    with transaction.atomic():
        Order.objects.create(number=number)
        result = confirm.delay(number)
    return HttpResponse(f"{result.id}\n")


urlpatterns = [path("orders/<int:number>/", order)]
