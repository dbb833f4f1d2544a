"""An agent in a training process, through which another process records a few of its steps, and its clients.

server.py    `start_server()`, and what the agent does when it is asked
http.py      its HTTP server, closed to strangers and to web pages
requests.py  the same requests as files of a run folder
protocol.py  the requests, and the files by which clients find agents
client.py    asks agents; targets.py finds the agents that a user means
"""
