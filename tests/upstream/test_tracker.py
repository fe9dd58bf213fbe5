"""The tracker is complete whenever it is read, and actions follow a complete save."""

from types import SimpleNamespace

from megatron_switch.checkpoint.load.files import TRACKER
from megatron_switch.upstream.tracker import TrackerRenamed, after_saving


def test_only_the_tracker_is_renamed_into_place(tmp_path):
    from megatron.core.msc_utils import maybe_msc

    client = TrackerRenamed(maybe_msc)
    tracker = tmp_path / TRACKER
    tracker.write_text("3")
    with client.open(str(tracker), "w") as stream:
        stream.write("6")
        assert tracker.read_text() == "3"
    with client.open(str(tracker), "r") as stream:
        assert stream.read() == "6"
    other = tmp_path / "other.txt"
    with client.open(str(other), "w") as stream:
        assert other.exists()
    assert client.os.path.isfile(str(tracker))


def test_a_complete_save_is_followed_by_what_was_asked_for(tmp_path):
    client = TrackerRenamed(SimpleNamespace(open=open))
    seen = []

    def note(folder):
        seen.append((folder, (folder / TRACKER).read_text()))

    def save(number):
        with client.open(str(tmp_path / TRACKER), "w") as file:
            file.write(number)

    with after_saving(note):
        save("3")
        with client.open(str(tmp_path / "another file"), "w") as file:
            file.write("4")
    save("5")
    assert seen == [(tmp_path, "3")]
