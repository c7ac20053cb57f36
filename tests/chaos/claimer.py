"""Claims 100 messages, says so, and does nothing more. Arguments: database URL, topic, group, visibility timeout."""

from __future__ import annotations

import signal
import sys

import custody

if __name__ == "__main__":
    url, topic, group, visibility = sys.argv[1:]
    with custody.connect(url, worker="claimer") as c:
        lease = c.claim(topic, group, max_messages=100, visibility_timeout=visibility)
        print(lease.lease_id, len(lease))
        signal.pause()
