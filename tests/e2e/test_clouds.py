"""Ranks in S3 and behind ssh, on servers of this machine; they need `pip install -e '.[cloud-tests]'`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.errors import UnreadableTraceError
from stepscope.readers import open_trace
from stepscope.trace.cache import TraceCache
from tests.simulator.ranks import write_ranks

RANKS = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    write_ranks(tmp_path / "ranks", RANKS, lambda step: 1, layers=2, steps=6)
    return tmp_path / "ranks"


def report(folder: str, target: Path) -> Any:
    assert main(["diagnose", folder, "--json", str(target)]) == 0
    return json.loads(target.read_bytes())


class TestS3:
    @pytest.fixture
    def bucket(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        pytest.importorskip("s3fs")
        boto3 = pytest.importorskip("boto3")
        server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="traces")
        for file in folder.iterdir():
            client.upload_file(str(file), "traces", f"job/{file.name}")
        yield client
        server.stop()

    def test_ranks_are_diagnosed_and_kept_by_their_etag(self, bucket: Any, folder: Path, tmp_path: Path) -> None:
        there, here = report("s3://traces/job", tmp_path / "there"), report(str(folder), tmp_path / "here")
        assert [each["headline"] for each in there["ranks"]] == [each["headline"] for each in here["ranks"]]
        assert there["across_ranks"] == [
            json.loads(json.dumps(each).replace(str(folder), "s3://traces/job")) for each in here["across_ranks"]
        ]
        cache, url = TraceCache(tmp_path / "traces"), "s3://traces/job/rank0.json.gz"
        assert open_trace(url, cache=cache).metadata.rank == 0
        bucket.upload_file(str(folder / "rank1.json.gz"), "traces", "job/rank0.json.gz")
        s3fs = pytest.importorskip("s3fs")

        s3fs.S3FileSystem.clear_instance_cache()  # as in another process
        assert open_trace(url, cache=cache).metadata.rank == 1

    @pytest.mark.parametrize("key", ["traces/none.json", "no-such-bucket/a.json"])
    def test_what_is_not_there_is_one_sentence(self, bucket: Any, key: str) -> None:
        with pytest.raises(UnreadableTraceError, match=key.partition("/")[0]):
            open_trace(f"s3://{key}")


class TestSsh:
    @pytest.fixture
    def host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """The address of a server that lets one key in, which the home folder has."""
        pytest.importorskip("sshfs")
        asyncssh = pytest.importorskip("asyncssh")
        home = tmp_path / "home" / ".ssh"
        home.mkdir(parents=True)
        monkeypatch.setenv("HOME", str(home.parent))
        own, user = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
        user.write_private_key(home / "id_ed25519")
        allowed = asyncssh.import_authorized_keys(user.export_public_key().decode())
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        async def listen() -> Any:
            return await asyncssh.listen(
                "127.0.0.1", 0, server_host_keys=[own], authorized_client_keys=allowed, sftp_factory=True
            )

        server = asyncio.run_coroutine_threadsafe(listen(), loop).result(20)
        port = server.get_port()
        (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {own.export_public_key().decode()}")
        yield f"ssh://someone@127.0.0.1:{port}"
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)

    def test_ranks_are_diagnosed(self, host: str, folder: Path, tmp_path: Path) -> None:
        there = report(f"{host}{folder}", tmp_path / "there")
        assert [each["trace"]["rank"] for each in there["ranks"]] == list(range(RANKS))
        with pytest.raises(UnreadableTraceError, match="no file"):
            open_trace(f"{host}{folder}/none.json")

    def test_a_host_that_is_not_known_is_refused(self, host: str, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "home" / ".ssh" / "known_hosts").write_text("")
        with pytest.raises(UnreadableTraceError, match="not trusted"):
            open_trace(f"{host}{folder}/rank0.json.gz")
