"""A worker whose process ends without a word at the poisoned message, and takes its whole batch with it.

Arguments: database URL, topic, group, visibility timeout. Ends with 0 when the group has nothing left.
"""

from __future__ import annotations

import os
import sys

import custody

if __name__ == "__main__":
    url, topic, group, visibility = sys.argv[1:]
    with custody.connect(url, pool_size=2) as c:
        while True:
            lease = c.claim(topic, group, max_messages=1000, visibility_timeout=visibility)
            if not lease and c.stats(topic, group).depth == 0:
                sys.exit(0)
            for message in lease:
                if message.payload == "poison":
                    os._exit(70)
            if lease:
                lease.ack()
