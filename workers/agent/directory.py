"""The node's place in the directory, where the agent was given one."""

from __future__ import annotations

import os
import socket

from workers.agent.node import Node
from workers.directory.address import open_directory
from workers.directory.base import NodeRecord
from workers.directory.publisher import DirectoryPublisher


def make_publisher(node: Node) -> DirectoryPublisher:
    """Runs beside the other loops of the agent; call it inside the event loop. ConfigError."""
    settings = node.settings
    directory = open_directory(settings.directory, settings.cluster, node.clock)
    return DirectoryPublisher(directory, node_record(node), node.log, node.readable_runs)


def node_record(node: Node) -> NodeRecord:
    settings = node.settings
    endpoints = [settings.endpoint]
    if settings.tcp_port:
        endpoints.append(f"tcp:{settings.tcp_host}:{settings.tcp_port}")
    return NodeRecord(
        settings.node_id, node.incarnation, endpoints, os.getpid(), socket.gethostname()
    )
