"""What the metadata services of the clouds say about this host, as documented, and what becomes of their failures."""

from collections.abc import Iterator

import pytest

from slipstream.actors.host import preemption
from slipstream.actors.host.preemption import Aws, Azure, Gcp, MetadataError, watch_notices
from slipstream.common.process.shutdown import EXIT_PREEMPTED, Shutdown
from tests.actors.host.metadata_service import MetadataService
from tests.waiting import wait_until

DEADLINE_S = 60.0
ACTION = "/latest/meta-data/spot/instance-action"
INSTANCE = "/computeMetadata/v1/instance/"
PREEMPTED = INSTANCE + "preempted?wait_for_change=true&timeout_sec=5"
MAINTENANCE = INSTANCE + "maintenance-event"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
EVENT = """{"EventId": "A123BC45-1234-5678-AB90-ABCDEF123456", "EventType": "%s", "ResourceType": "VirtualMachine",
"Resources": ["%s"], "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", "Description": "",
"EventSource": "Platform", "DurationInSeconds": -1}"""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    monkeypatch.setattr(preemption, "TIMEOUT_S", DEADLINE_S)  # beside other load it may answer later than a cloud's
    with MetadataService() as service:
        yield service


def scheduled(*events: str) -> tuple[int, str]:
    return 200, f'{{"DocumentIncarnation": 1, "Events": [{", ".join(events)}]}}'


def test_aws_is_asked_with_a_token_which_is_fetched_anew_once_it_has_expired(service: MetadataService) -> None:
    service.wants_tokens()
    aws = Aws(service.url)
    assert aws.look() == aws.look() == ""
    method, path, headers = service.asked[0]
    assert (method, path, headers["x-aws-ec2-metadata-token-ttl-seconds"]) == ("PUT", "/latest/api/token", "21600")
    assert service.paths()[1:] == [ACTION] * 2  # one token is enough
    assert {headers["x-aws-ec2-metadata-token"] for _, _, headers in service.asked[1:]} == {service.tokens[0]}
    service.tokens.clear()
    service.asked.clear()
    service.answers |= interruption("terminate")
    assert aws.look()
    assert service.paths() == [ACTION, "/latest/api/token", ACTION]


def interruption(action: str) -> dict[str, tuple[int, str]]:
    return {ACTION: (200, f'{{"action": "{action}", "time": "2017-09-18T08:22:00Z"}}')}


def event(kind: str) -> dict[str, tuple[int, str]]:
    return {NAME: (200, "vmss_0"), EVENTS: scheduled(EVENT % ("Reboot", "vmss_0"), EVENT % (kind, "vmss_0"))}


@pytest.mark.parametrize(
    ("cloud", "answers", "words"),
    [
        (Aws, interruption("terminate"), "AWS will terminate this host at 2017-09-18T08:22:00Z"),
        (Aws, interruption("stop"), "AWS will stop this host at 2017-09-18T08:22:00Z"),
        (Aws, interruption("hibernate"), "AWS will hibernate this host at 2017-09-18T08:22:00Z"),
        (Gcp, {MAINTENANCE: (200, "NONE"), PREEMPTED: (200, "TRUE")}, "GCP preempts this host"),
        (Gcp, {MAINTENANCE: (200, "TERMINATE_ON_HOST_MAINTENANCE")}, "GCP will end this host for maintenance"),
        (Azure, event("Preempt"), "Azure: Preempt of this host, not before Mon, 19 Sep 2016 18:29:47 GMT"),
        (Azure, event("Terminate"), "Azure: Terminate of this host, not before Mon, 19 Sep 2016 18:29:47 GMT"),
    ],
)
def test_a_cloud_gives_notice_of_what_takes_this_host_away(
    service: MetadataService, cloud: type[Aws | Gcp | Azure], answers: dict[str, tuple[int, str]], words: str
) -> None:
    if cloud is Aws:
        service.wants_tokens()
    service.answers = answers
    assert cloud(service.url).look() == words


def test_a_token_that_no_request_could_carry_is_fetched_again(service: MetadataService) -> None:
    aws, portal = Aws(service.url), "<html>\n a captive portal\n</html>"
    service.answers["/latest/api/token"] = 200, portal
    with pytest.raises(MetadataError, match=r"api/token answered without a token: .*captive portal"):
        aws.look()
    service.answers["/latest/api/token"] = 200, "t\u00f6ken"
    with pytest.raises(MetadataError, match="without a token"):
        aws.look()
    service.wants_tokens()
    service.answers |= interruption("terminate")
    assert aws.look()


@pytest.mark.parametrize("maintenance", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"])
def test_gcp_is_asked_in_its_flavour_and_says_nothing_if_hosts_stay(service: MetadataService, maintenance: str) -> None:
    service.answers = {MAINTENANCE: (200, maintenance), PREEMPTED: (200, "FALSE\n")}
    assert Gcp(service.url).look() == ""
    assert service.paths() == [MAINTENANCE, PREEMPTED]
    assert all(headers["metadata-flavor"] == "Google" for _, _, headers in service.asked)


def test_what_azure_plans_for_another_host_or_what_leaves_this_one_is_no_notice(service: MetadataService) -> None:
    events = scheduled(EVENT % ("Preempt", "vmss_1"), EVENT % ("Freeze", "vmss_0"))
    service.answers = {NAME: (200, "vmss_0"), EVENTS: events}
    azure = Azure(service.url)
    assert azure.look() == azure.look() == ""
    assert service.paths() == [NAME, EVENTS, EVENTS]
    assert all(headers["metadata"] == "true" for _, _, headers in service.asked)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, "internal error"), "answered with status 500"),
        ((403, "forbidden"), "answered with status 403"),
        ((302, "http://["), "answered with status 302"),
        ((200, "<html>a captive portal</html>"), "captive portal"),
        ((200, '{"action": "terminate"}'), "time"),
        ((200, " " * 100_000), "more than 65536 bytes"),
    ],
)
def test_an_undocumented_answer_is_an_error(service: MetadataService, answer: tuple[int, str], words: str) -> None:
    service.wants_tokens()
    service.answers[ACTION] = answer
    with pytest.raises(MetadataError, match=words):
        Aws(service.url).look()


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_a_service_that_is_not_there_or_too_slow_is_an_error(
    service: MetadataService, cloud: type[Aws | Gcp | Azure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "TIMEOUT_S", 0.05)
    service.delay_s = 1.0
    for url in ("http://127.0.0.1:9", service.url):
        with pytest.raises(MetadataError, match="does not answer"):
            cloud(url).look()


def test_a_notice_asks_this_process_to_leave_and_a_failure_does_not(
    service: MetadataService, shutdown: Shutdown, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    watch_notices(f"aws@{service.url}/", shutdown)  # no token yet: a 404 where it is given
    wait_until(lambda: "notices of the cloud do not arrive" in caplog.text, "a failure")
    service.answers["/latest/api/token"] = 500, "another failure"
    asked = len(service.asked)
    wait_until(lambda: len(service.asked) > asked + 3, "more failures")
    del service.answers["/latest/api/token"]
    service.wants_tokens()
    asked = len(service.asked)
    wait_until(lambda: len(service.asked) > asked + 3, "more questions")
    assert not shutdown.requested.is_set()
    service.answers |= interruption("terminate")
    assert shutdown.requested.wait(DEADLINE_S)
    assert shutdown.exit_code == EXIT_PREEMPTED
    assert caplog.text.count("notices of the cloud do not arrive") == 1
    assert "AWS will terminate this host" in caplog.text
