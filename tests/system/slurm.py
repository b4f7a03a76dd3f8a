"""A Slurm of this machine alone: munged, slurmctld and slurmd in a folder, four pretended processors, two partitions.
Jobs in `urgent` take the place of jobs in `spare`, which are queued again. Needs root, and slurmd with its friends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=spare Nodes={host} Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes={host} PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF
"""
START_S = 60.0


class LocalSlurm:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        ports = [_free_port() for _ in range(2)]
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir()
        text = CONFIG.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=ports)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "munge").chmod(0o711)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._run("munged", "--force", *(f"--{name}={folder}/munge/{file}" for name, file in files.items()))
        self._run("slurmctld", "-c")
        self._run("slurmd")
        deadline = time.monotonic() + START_S
        while "idle" not in self.ask("sinfo", "--noheader", "--format=%T"):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)

    @staticmethod
    def possible() -> bool:
        return os.geteuid() == 0 and all(shutil.which(one) for one in ("munged", "slurmctld", "slurmd", "sbatch"))

    def submit(self, folder: Path, *words: str, **variables: str) -> str:
        """The number of the job."""
        env = {**self.environment, **variables}
        command = ["sbatch", "--parsable", "--export=ALL", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout

    def states(self, job: str) -> list[str]:
        """Of its tasks that have not ended."""
        return self.ask("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%T").split()

    def close(self) -> None:
        self.ask("scancel", "--user=root", "--full", "--signal=KILL")
        self.ask("scontrol", "shutdown")
        deadline = time.monotonic() + 10
        while any((self._folder / name).exists() for name in ("slurmctld.pid", "slurmd.pid")):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self._run("munged", "--stop", f"--socket={self._folder}/munge/socket")

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
