"""`omni-proxy top`: the fleet live, on the whole terminal.

view.py holds what is looked at and obeys keys, frame.py draws it, follower.py listens to the feed
in a thread of its own, command.py owns the terminal and its keys.
"""
