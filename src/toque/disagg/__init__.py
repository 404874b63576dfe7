"""Engines that share work: pages travel between them, requests move when one is lost.

    server process                                 engine processes
    fleet.py      one ServePort over many          roles.py      an EnginePort around the channel
    routing.py    which engine a request goes to   exporter.py   keeps computed pages for others
                                                   importer.py   puts others' pages into the tree
                                                   pullers.py    threads that pull, and verify
                                                   transport.py  shm.py, tcp.py: bytes of pages

The prefix tree is where a hand-over meets the engine: what arrives and verifies becomes a cached
prefix, and the request goes on like any other that finds its beginning in the cache. What does not
arrive is not in the tree, so it is computed. There is no other way in, hence none for a wrong byte.
"""
