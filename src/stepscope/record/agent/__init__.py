"""The agent in a training process, through which another process records some of its steps, and the clients of agents.

server.py    `start_server()` and the service that carries out requests
http.py      its HTTP server, closed to strangers and to web pages
protocol.py  the requests, also as files of a run folder, and the files by which clients find agents
client.py    the client of one agent; targets.py finds the agents that a user means
"""
