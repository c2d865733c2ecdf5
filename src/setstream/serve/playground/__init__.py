"""The front page, a live demonstration: points stream into five models, pixels into a picture, events past a window.

pages/         what the browser gets
session.py     one WebSocket: messages in, answers out
tabs.py        what the messages do: points and the mixtures that models predict, pixels and images
windows.py     events, and a window that slides over them
"""
