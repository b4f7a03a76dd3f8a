"""The files of examples/deploy/kubernetes: by the published schemas, by what Kubernetes cannot check, and for real as
far as a machine without it allows: pods as processes of the image, with their volumes, user and signals."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.containers import ROOT, Image, Volume, possible, stop
from tests.system.conftest import SCRIPTS, WAIT_S, Run

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make integrations installs it")
yaml = pytest.importorskip("yaml")

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]
FILES = ROOT / "examples" / "deploy" / "kubernetes"
SCHEMAS = ("1.31", "1.34")
"""The oldest that a cluster should have: FailIndex is on by default since."""
GROUPS = "leaderworkerset.x-k8s.io/v1"
Manifest = dict[str, Any]


def manifests(kind: str = "") -> list[Manifest]:
    found = [one for file in sorted(FILES.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    return [one for one in found if kind in ("", one["kind"])]


def the(kind: str) -> Manifest:
    (found,) = manifests(kind)
    return found


def pod_templates() -> dict[str, Manifest]:
    return {
        "syncer": the("StatefulSet")["spec"]["template"],
        "learner": the("Job")["spec"]["template"],
        "group": the("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"],
    }


# ---- by schemas, and by rules that schemas do not know ------------------------------------------------------------


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("kind", ["Service", "StatefulSet", "Job"])
def test_a_file_is_as_kubernetes_publishes_its_schema(kind: str, version: str) -> None:
    kubernetes_validate.validate(the(kind), version, strict=True)


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_pods_of_groups_are_pods(version: str) -> None:
    """LeaderWorkerSet's own schema is in no package: its pod templates are held to that of pods."""
    template = pod_templates()["group"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, version, strict=True)


def test_the_fields_of_groups_are_those_that_leaderworkerset_has() -> None:
    """As of its v1: the fields that this file uses, their types and the words that are allowed."""
    groups = the("LeaderWorkerSet")
    assert groups["apiVersion"] == GROUPS and set(groups) == {"apiVersion", "kind", "metadata", "spec"}
    spec = groups["spec"]
    assert set(spec) <= {"replicas", "startupPolicy", "leaderWorkerTemplate", "rolloutStrategy", "networkConfig"}
    assert isinstance(spec["replicas"], int) and spec["startupPolicy"] in ("LeaderCreated", "LeaderReady")
    template = spec["leaderWorkerTemplate"]
    assert set(template) <= {"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy"}
    assert template["size"] > 1 and template["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_a_wrong_field_would_be_seen() -> None:
    job = json.loads(json.dumps(the("Job")))
    job["spec"]["podFailurePolicy"]["rules"][0]["onPodCondition"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, SCHEMAS[0], strict=True)


@pytest.mark.parametrize("name", ["syncer", "learner", "group"])
def test_a_pod_has_no_rights_and_writes_to_volumes_of_stated_size(name: str) -> None:
    spec = pod_templates()[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    (container,) = spec["containers"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert all("sizeLimit" in one["emptyDir"] for one in volumes.values() if "emptyDir" in one)
    paths = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert "/tmp" in paths and container["workingDir"] in paths
    if name != "syncer":
        assert volumes[paths["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_no_file_holds_a_secret_and_every_name_is_one_that_another_file_or_the_page_makes() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for name in ("learner", "group"):
        (container,) = pod_templates()[name]["spec"]["containers"]
        (join,) = (one for one in container["env"] if one["name"] == "ATOLL_JOIN")
        secret = join["valueFrom"]["secretKeyRef"]
        assert f"create secret generic {secret['name']} --from-file={secret['key']}=" in page
        (script,) = (one["configMap"]["name"] for one in pod_templates()[name]["spec"]["volumes"] if "configMap" in one)
        assert f"create configmap {script} " in page
    service, pods = the("Service"), the("StatefulSet")
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == pods["spec"]["template"]["metadata"]["labels"]


def judge(code: int, *, disrupted: bool = False) -> str:
    """What the Job's policy does with a pod that failed: the first rule that matches."""
    for rule in the("Job")["spec"]["podFailurePolicy"]["rules"]:
        if disrupted and any(one["type"] == "DisruptionTarget" for one in rule.get("onPodConditions", ())):
            return str(rule["action"])
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        (2, False, "FailIndex"),
        (143, False, "Ignore"),
        (137, True, "Ignore"),
        (1, False, "Count"),
        (137, False, "Count"),
    ],
)
def test_only_what_a_restart_cannot_mend_ends_an_index(code: int, disrupted: bool, action: str) -> None:
    assert judge(code, disrupted=disrupted) == action


# ---- as processes ---------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Pods of one node, whose network is the host's: the service's name is this machine's, at a port that is free."""

    image: Image
    folder: Path
    secret: str = ""
    port: int = field(default_factory=Run.free_port)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def pod(self, name: str, index: int = 0) -> Pod:
        return Pod(self, name, pod_templates()[name]["spec"], index)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "claim-data" / "run" / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def answers(self) -> bool:
        """The startup and readiness probe."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Pod:
    def __init__(self, cluster: Cluster, name: str, spec: Manifest, index: int) -> None:
        self._cluster, self._name, self._spec = cluster, f"{name}-{index}", spec
        (self._container,) = spec["containers"]
        self._lives = 0
        self._index = index
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> Pod:
        """A new pod: its emptyDirs are empty, its claim is what it was. `more`: words instead of the file's last."""
        self._lives += 1
        args = [*self._container["args"]]
        own = args[: args.index(self._name.partition("-")[0]) + 1]  # bash -c TEXT NAME; the words behind are the user's
        words = [self._adapted(one) for one in (*own, *(more or args[len(own) :]))]
        with (self._cluster.folder / f"{self._name}.log").open("a") as log:
            self.process = subprocess.Popen(self._words(words), text=True, stdout=log, stderr=subprocess.STDOUT)
        self._cluster.started.append(self.process)
        return self

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` does, and exec probes."""
        words = self._words([self._adapted(one) for one in command], bare=True)
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    def delete(self) -> int:
        """The exit code."""
        assert self.process is not None
        return stop(self.process, self._spec["terminationGracePeriodSeconds"])

    def ended(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def _words(self, command: list[str], *, bare: bool = False) -> list[str]:
        context = self._spec["securityContext"]
        user, folder = f"{context['runAsUser']}:{context['runAsGroup']}", self._container["workingDir"]
        volumes = [Volume(self._source(one["name"]), one["mountPath"]) for one in self._container["volumeMounts"]]
        volumes.append(Volume(self._cluster.folder / "hosts", "/etc/hosts"))
        image = self._cluster.image
        return image.container(command, self._environment(), folder, volumes, user=user, bare=bare).words()

    def _environment(self) -> dict[str, str]:
        found = {"JOB_COMPLETION_INDEX": str(self._index)}
        for one in self._container["env"]:
            found[one["name"]] = self._adapted(one["value"]) if "value" in one else self._cluster.secret
        return found

    def _source(self, name: str) -> Path:
        kinds = {one["name"]: one for one in self._spec["volumes"]}
        if "configMap" in kinds.get(name, {}):
            folder = self._cluster.folder / "script"
        else:
            folder = self._cluster.folder / (f"{self._name}-{self._lives}-{name}" if name in kinds else f"claim-{name}")
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o2770)  # as fsGroup makes it
            os.chown(folder, 0, self._spec["securityContext"]["fsGroup"])
        return folder

    def _adapted(self, text: str) -> str:
        return re.sub(r"\b7077\b", str(self._cluster.port), text)


@pytest.fixture
def cluster(image: Image, tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "hosts").write_text("127.0.0.1 localhost atoll-syncer\n")
    (folder / "script").mkdir()
    (folder / "script" / "train.py").write_text((SCRIPTS / "plain.py").read_text())
    found = Cluster(image, folder)
    yield found
    for process in found.started:
        process.kill()  # unshare takes all of the pod along
        process.wait()


@pytest.mark.skipif(not possible(), reason="needs root, mount namespaces and setpriv")
def test_pods_are_deleted_and_come_back_and_the_run_ends_clean(cluster: Cluster) -> None:
    asked = ("--learners=2", "--steps=200", "--set=fragments=4", "--set=sync_every=8", "--store=file:///data/bucket")
    syncer = cluster.pod("syncer").start(*asked)
    cluster.until(cluster.answers)
    link = syncer.execute("atoll", "tokens", "--keys", "/data/keys", "link")
    cluster.secret = link.stdout.strip()
    assert cluster.secret.startswith("atoll://"), link.stderr
    learners = [cluster.pod("learner", index).start() for index in range(2)]
    cluster.until(lambda: len(cluster.events("round")) > 8)

    code = learners[1].delete()
    assert code == 143 and judge(code) == "Ignore"
    assert [event["learner"] for event in cluster.events("left")] == ["learner-1"], "it gave its last steps"
    learners[1].start()

    assert syncer.delete() == 143
    syncer.start(*asked)
    cluster.until(cluster.answers)
    probe = pod_templates()["syncer"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    alive = syncer.execute(*probe)
    assert alive.returncode == 0 and json.loads(alive.stdout)["round"] > 0, alive
    cluster.until(lambda: [event["learner"] for event in cluster.events("joined")].count("learner-1") == 2)
    for folder in cluster.folder.glob("learner-*-scratch"):
        (folder / "gate").touch()  # short steps from here on

    assert [learner.ended() for learner in learners] == [0, 0], cluster.logs()
    cluster.until(lambda: "the run is over" in (cluster.folder / "syncer-0.log").read_text())
    assert syncer.execute(*probe).returncode == 0, "a pod whose run is over is not restarted"
    run = cluster.folder / "claim-data" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["per_learner"]) == {"learner-0", "learner-1"}
    assert summary["tokens"]["lost"] == summary["tokens"]["in_flight"] == 0
    assert "did not begin here" not in (cluster.folder / "syncer-0.log").read_text(), "with a bucket it goes on too"
    assert syncer.execute("atoll", "verify", "file:///data/bucket").returncode == 0, cluster.logs()
    assert syncer.execute("atoll", "verify", "run").returncode == 0
    assert syncer.delete() == 0
    assert (
        cluster.secret.partition("@")[0].removeprefix("atoll://") not in (cluster.folder / "syncer-0.log").read_text()
    )


@pytest.mark.skipif(not possible(), reason="needs root, mount namespaces and setpriv")
def test_a_learner_that_no_restart_can_mend_fails_its_index(cluster: Cluster) -> None:
    cluster.secret = "atoll://TOKEN@nowhere"
    learner = cluster.pod("learner").start()
    assert judge(learner.ended()) == "FailIndex"
    assert "is no join link" in (cluster.folder / "learner-0.log").read_text()
