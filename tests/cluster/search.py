"""Goes through every world that can be reached, once."""
from __future__ import annotations
import sys, time
from collections import deque
from tests.cluster import world as w

def search(most=10**9, begin=None):
    start = begin or w.begin()
    seen = {hash(start)}
    came = {}
    queue = deque([(start, None)])
    count = 0
    while queue:
        world, path = queue.popleft()
        count += 1
        if count > most: return count, None
        try:
            nexts = list(w.moves(world))
        except w.Broken as e:
            return count, (str(e), path)
        for name, nxt in nexts:
            nxt = w.tidy(nxt)
            h = hash(nxt)
            if h in seen: continue
            seen.add(h)
            step = (name, path)
            try: w.check(nxt)
            except w.Broken as e: return count, (str(e), step)
            queue.append((nxt, step))
    return count, None
if __name__ == "__main__":
    t=time.time(); n, bad = search(int(sys.argv[1]))
    print(n, time.time()-t)
    if bad:
        print(bad[0]); p=bad[1]; l=[]
        while p: l.append(p[0]); p=p[1]
        print("\n".join(reversed(l)))
