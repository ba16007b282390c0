"""The few messages of etcd's v3 API that are used here, under a package name of our own.

Built from a table instead of generated files: the names cannot meet those of another etcd client
in the same process, and no generator is needed. Field numbers are etcd's (api/etcdserverpb and
api/mvccpb, the same since 3.4); methods are called by etcd's own paths.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "perilune.etcd"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "bool": _FIELD.TYPE_BOOL,
    "enum": _FIELD.TYPE_INT32,  # the same on the wire
}
# message -> fields as "number type name"; "*" marks repeated ones, "|" those of the one oneof
_MESSAGES: Final = {
    "ResponseHeader": "1 uint64 cluster_id, 2 uint64 member_id, 3 int64 revision, 4 uint64 raft_term",
    "KeyValue": "1 bytes key, 2 int64 create_revision, 3 int64 mod_revision, 4 int64 version, 5 bytes value, 6 int64 lease",
    "Event": "1 enum type, 2 KeyValue kv",
    "RangeRequest": "1 bytes key, 2 bytes range_end, 3 int64 limit, 4 int64 revision, 7 bool serializable, 8 bool keys_only, 9 bool count_only",
    "RangeResponse": "1 ResponseHeader header, 2 *KeyValue kvs, 3 bool more, 4 int64 count",
    "PutRequest": "1 bytes key, 2 bytes value, 3 int64 lease",
    "PutResponse": "1 ResponseHeader header",
    "DeleteRangeRequest": "1 bytes key, 2 bytes range_end",
    "DeleteRangeResponse": "1 ResponseHeader header, 2 int64 deleted",
    "RequestOp": "1 |RangeRequest request_range, 2 |PutRequest request_put, 3 |DeleteRangeRequest request_delete_range",
    "ResponseOp": "1 |RangeResponse response_range, 2 |PutResponse response_put, 3 |DeleteRangeResponse response_delete_range",
    "Compare": "1 enum result, 2 enum target, 3 bytes key, 4 |int64 version, 5 |int64 create_revision, 6 |int64 mod_revision, 7 |bytes value, 8 |int64 lease",
    "TxnRequest": "1 *Compare compare, 2 *RequestOp success, 3 *RequestOp failure",
    "TxnResponse": "1 ResponseHeader header, 2 bool succeeded, 3 *ResponseOp responses",
    "LeaseGrantRequest": "1 int64 TTL, 2 int64 ID",
    "LeaseGrantResponse": "1 ResponseHeader header, 2 int64 ID, 3 int64 TTL, 4 string error",
    "LeaseRevokeRequest": "1 int64 ID",
    "LeaseRevokeResponse": "1 ResponseHeader header",
    "LeaseKeepAliveRequest": "1 int64 ID",
    "LeaseKeepAliveResponse": "1 ResponseHeader header, 2 int64 ID, 3 int64 TTL",
    "WatchCreateRequest": "1 bytes key, 2 bytes range_end, 3 int64 start_revision, 4 bool progress_notify",
    "WatchProgressRequest": "",
    "WatchRequest": "1 |WatchCreateRequest create_request, 3 |WatchProgressRequest progress_request",
    "WatchResponse": "1 ResponseHeader header, 2 int64 watch_id, 3 bool created, 4 bool canceled, 5 int64 compact_revision, 6 string cancel_reason, 11 *Event events",
}  # fmt: skip
EQUAL: Final = 0
TARGET_CREATE: Final = 1
TARGET_MOD: Final = 2
EVENT_DELETE: Final = 1


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    number, kind, name = text.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("*"):
        kind, field.label = kind[1:], _FIELD.LABEL_REPEATED
    elif kind.startswith("|"):
        kind = kind[1:]
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="perilune/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _MESSAGES
    }


MESSAGES: Final = _build()
"""Message classes by name."""
