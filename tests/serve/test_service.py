"""What the service answers: the law of the library's answers, with fresh noise, from the model whose hash it names."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from dpcert.certification.sweep import SmoothedClassifier
from dpcert.runs.open import open_run
from dpcert.serve import answers
from tests.serve.client import SHA256, STORED, require_right

UNCLEAR = 33  # index of a test image whose votes are divided
CALLS, VOTES, SURE = 40, 500, 1e-6


def image_body(image) -> str:
    return json.dumps({"image": image.tolist()})


def test_a_prediction_is_a_certificate_that_follows_from_its_votes(service, digits, body):
    answer = service.call("POST", "/predict", body)
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    require_right(answer.json, n=10_000)
    assert answer.json["class"] == int(digits[1][0]) and not answer.json["abstained"] and answer.json["n0"] == 100
    answers.Prediction.model_validate(answer.json)


def test_a_picture_and_its_values_get_the_same_class(service, digits):
    image = digits[0][2]
    pixels = Image.fromarray((image[0] * 255).round().byte().numpy())
    for kind, name in (("image/png", "PNG"), ("image/jpeg", "JPEG")):
        file = io.BytesIO()
        pixels.save(file, name)
        answer = service.call("POST", "/predict?n=500", file.getvalue(), kind)
        require_right(answer.json, n=500)
        assert answer.json["class"] == int(digits[1][2])
    flat = service.call("POST", "/predict?n=500&alpha=0.01", json.dumps({"image": image[0].tolist()}))
    require_right(flat.json, n=500, alpha=0.01)


def test_an_image_that_is_no_digit_can_make_it_abstain(service):
    found = [
        service.call("POST", f"/predict?n=20&alpha={alpha}", image_body(torch.full((28, 28), 0.5))).json for alpha in (1e-9,)
    ]
    assert found[0]["abstained"] and found[0]["class"] == -1 and found[0]["radius"] == 0.0


def counts_of_the_service(service, image, chosen: int) -> np.ndarray:
    return np.array(
        [service.call("POST", f"/predict?n={VOTES}", image_body(image)).json["votes"][chosen] for _ in range(CALLS)]
    )


def counts_of_the_library(model, image, chosen: int, sigma: float) -> np.ndarray:
    """Through the public interface: with fresh noise the answers of one call are independent."""
    certificates = SmoothedClassifier(model, sigma, fresh_noise=True).certify(image.expand(CALLS, *image.shape), n=VOTES)
    return torch.where(certificates.predict == chosen, certificates.count, 0).numpy()


def p_values(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Whether two sets of counts have the same mean, and whether those of `one` vary as independent votes do."""
    total, both = CALLS * VOTES, int(one.sum() + other.sum())
    table = [[one.sum(), total - one.sum()], [other.sum(), total - other.sum()]]
    share, free = both / (2 * total), CALLS - 1
    spread = ((one - one.mean()) ** 2).sum() / (VOTES * share * (1 - share))
    return float(stats.fisher_exact(table)[1]), float(2 * min(stats.chi2.cdf(spread, free), stats.chi2.sf(spread, free)))


def test_answers_have_the_law_of_the_library_and_twins_do_not(service, digits, evidence):
    model, image = open_run(STORED).model, digits[0][UNCLEAR]
    chosen = service.call("POST", "/predict", image_body(image)).json["class"]
    ours = counts_of_the_service(service, image, chosen)
    theirs = counts_of_the_library(model, image, chosen, 0.5)
    assert 0.55 < theirs.mean() / VOTES < 0.97, "choose another image: its votes are not divided"
    assert min(p_values(ours, theirs)) > SURE
    assert p_values(counts_of_the_library(model, image, chosen, 0.55), theirs)[0] < SURE  # another sigma
    assert p_values(np.full(CALLS, ours[0]), theirs)[1] < SURE  # the same noise every time
    figure = f"{CALLS} equal requests have the library's law and vary as independent noise does"
    evidence("S7", figure=figure, trials=CALLS, twin="another sigma, or the same noise every time: caught")


def test_equal_requests_have_different_noise(service, digits):
    votes = [service.call("POST", "/predict?n=1000", image_body(digits[0][UNCLEAR])).json["votes"] for _ in range(6)]
    assert len({tuple(each) for each in votes}) >= 3
    pictures = [service.call("POST", "/noisy?count=2", image_body(digits[0][0])).json["images"] for _ in range(2)]
    assert len({picture for pair in pictures for picture in pair}) == 4


def test_streamed_votes_are_counts_only_and_end_with_a_prediction(service, body):
    answer = service.call("POST", "/votes?n=3000", body)
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson"
    require_right(lines[-1], n=3000)
    cast = [line["cast"] for line in lines[:-1]]
    assert len(cast) >= 2 and all(set(line) == {"votes", "cast"} and sum(line["votes"]) <= line["cast"] for line in lines[:-1])
    assert cast == sorted(cast) and cast[-1] <= 3000
    assert all(np.less_equal(line["votes"], lines[-1]["votes"]).all() for line in lines[:-1])


def test_noisy_copies_are_pictures_of_the_model_s_size(service, body):
    answer = service.call("POST", "/noisy?count=3", body).json
    answers.Noisy.model_validate(answer)
    assert len(answer["images"]) == len(answer["classes"]) == 3 and answer["sigma"] == 0.5
    picture = Image.open(io.BytesIO(base64.b64decode(answer["images"][0].split(",")[1])))
    assert picture.size == (28, 28)


@pytest.mark.parametrize("target", ["smoothed", "base"])
@pytest.mark.parametrize("strength", [0.0, 0.7, 3.0])
def test_an_attacked_image_is_within_its_strength(service, digits, target, strength):
    image = digits[0][0]
    answer = service.call("POST", f"/attack?strength={strength}&target={target}", image_body(image)).json
    answers.Attacked.model_validate(answer)
    moved = torch.tensor(answer["image"], dtype=torch.float64)
    distance = float((moved - image.double()).norm())
    assert distance <= strength and distance == pytest.approx(answer["distance"], abs=1e-6)
    assert float(moved.min()) >= 0 and float(moved.max()) <= 1 and answer["label"] == answer["base_class_before"] == 7
    again = service.call("POST", "/predict?n=500", json.dumps({"image": answer["image"]}))
    require_right(again.json, n=500)
    if strength == 3.0 and target == "smoothed":
        assert again.json["class"] != 7  # beyond the radius the attack wins


def test_inside_the_radius_the_class_holds_under_attack(service, body):
    first = service.call("POST", "/predict", body).json
    attacked = service.call("POST", f"/attack?strength={0.99 * first['radius']}", body).json
    assert service.call("POST", "/predict", json.dumps({"image": attacked["image"]})).json["class"] in (first["class"], -1)


def test_the_model_card_has_the_statement_and_the_certified_accuracy(service):
    card, metrics = service.call("GET", "/model").json, json.loads((STORED / "metrics.json").read_text())
    answers.Model.model_validate(card)
    assert card["model_sha256"] == SHA256 and card["input_shape"] == [1, 28, 28] and card["classes"] == 10 and card["gallery"]
    assert card["privacy"]["epsilon"] == pytest.approx(metrics["privacy"]["epsilon"], rel=1e-6) and card["privacy"]["private"]
    assert card["privacy"]["statement"].startswith("epsilon = 3.0000 at delta")
    (entry,) = card["certification"]
    assert entry["certified_accuracy"] == metrics["certification"][0]["certified_accuracy"] and entry["acr"] > 1


def test_the_gallery_is_the_test_set(service, digits):
    listed = service.call("GET", "/gallery?start=5&count=3").json
    assert listed["total"] == 10_000 and [item["index"] for item in listed["items"]] == [5, 6, 7]
    assert [item["label"] for item in listed["items"]] == digits[1][5:8].tolist()
    one = service.call("GET", "/gallery/6").json
    assert torch.equal(torch.tensor(one["image"]), digits[0][6]) and one["png"] == listed["items"][1]["png"]
    assert service.call("GET", "/gallery?start=9999").json["items"][0]["index"] == 9999
    assert service.call("GET", "/gallery?start=10000").json["items"] == []


def test_health_and_metrics(service, body):
    assert service.call("GET", "/health").json == {"status": "ok", "model_sha256": SHA256, "model_file": "same"}
    before = service.metric('dpcert_requests_total{route="/predict",status="200"}') if "/predict" in _text(service) else 0
    votes = service.metric("dpcert_votes_total")
    service.call("POST", "/predict?n=200", body)
    assert service.metric('dpcert_requests_total{route="/predict",status="200"}') == before + 1
    assert service.metric("dpcert_votes_total") == votes + 300
    text = _text(service)
    names = re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.M)
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) == 7
    assert all(re.fullmatch(r'[a-z_]+(\{[a-z0-9_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+', line) for line in samples), (
        samples
    )
    assert f'dpcert_model_info{{model_sha256="{SHA256}"}} 1' in samples


def _text(service) -> str:
    return service.call("GET", "/metrics").body.decode()


def test_openapi_describes_every_route_and_status(service):
    described = service.call("GET", "/openapi.json").json
    assert set(described["paths"]) == {
        *("/predict", "/votes", "/noisy", "/attack", "/model", "/gallery", "/gallery/{index}", "/health", "/metrics")
    }
    post = described["paths"]["/predict"]["post"]
    assert set(post["responses"]) >= {"200", "400", "401", "408", "413", "415", "422", "503", "504"}
    assert set(post["requestBody"]["content"]) == {"image/png", "image/jpeg", "application/json"}
    assert service.call("GET", "/docs").status == service.call("GET", "/redoc").status == 404  # they load from a CDN


def test_every_answer_forbids_what_the_page_does_not_need(service):
    for path in ("/health", "/nothing", "/model", "/"):
        headers = service.call("GET", path).headers
        assert "default-src 'none'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers
        assert "server" not in headers and "cache-control" in headers
    crossing = service.call("OPTIONS", "/predict", Origin="https://elsewhere.example", Access_Control_Request_Method="POST")
    assert crossing.status == 405 and "access-control-allow-origin" not in crossing.headers


def test_another_web_site_cannot_use_the_service_of_a_visitor(service, body):
    for site in ("cross-site", "same-site"):
        assert service.call("POST", "/predict?n=1", body, Sec_Fetch_Site=site).status == 403
    for site in ("same-origin", "none"):
        assert service.call("POST", "/predict?n=1", body, Sec_Fetch_Site=site).status == 200
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{service.port}",
        "127.0.0.1.elsewhere.example",
        "localhost.",
        "",
        "[::1",
    ):
        answer = service.call("GET", "/gallery/0", Host=host)  # a name of another site that leads to this machine
        assert answer.status == 403 and "the host is" in answer.json["error"], host
    for host in ("localhost", f"LOCALHOST:{service.port}", "127.0.0.1:80", "[::1]:8000", "[::1]"):
        assert service.call("GET", "/gallery/0", Host=host).status == 200


def test_the_log_has_a_line_for_each_request_and_no_image(service, body):
    service.call("POST", "/predict?n=1", body)
    service.call("GET", '/x"%0a{"level":"forged"}')
    service.wait_until_idle()  # a line is written after its answer was sent, and before the next request of the same client ends
    lines = [json.loads(line) for line in service.log().splitlines()]
    routes = [line["route"] for line in lines if line["event"] == "request"]
    assert "/predict" in routes and "none" in routes and "forged" not in service.log()
    assert set(lines[-1]) == {"time", "level", "event", "method", "route", "status", "ms", "sent", "client"}
    assert max(map(len, service.log().splitlines())) < 500
