#!/usr/bin/env bash
# The HTTP interface with curl alone: publish, receive, ack, nack, dead letters, replay, extend, in flight, idempotent
# publishing, transactions. Start a server first (custody serve), then run this; CUSTODY_URL names another one.
set -euo pipefail

URL="${CUSTODY_URL:-http://localhost:8080}"
RUN="$(date +%s)-$$" # so that every run has topics of its own
ORDERS="orders-$RUN"
STOCK="stock-$RUN"
PRODUCER="order-service-$RUN"

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# call STATUS METHOD PATH [BODY]: sends a request, expects the status, and keeps the answer in $ANSWER
call() {
    local wanted="$1" method="$2" path="$3" got
    local arguments=(--silent --show-error --write-out '\n%{http_code}' --request "$method")
    if [ $# -gt 3 ]; then arguments+=(--data "$4"); fi
    ANSWER="$(curl "${arguments[@]}" "$URL$path")" || fail "no answer from $URL; start one with: custody serve"
    got="${ANSWER##*$'\n'}"
    ANSWER="${ANSWER%$'\n'*}"
    echo "  $method $path -> $got $ANSWER"
    [ "$got" = "$wanted" ] || fail "$method $path: expected $wanted"
}

# has TEXT: the last answer contains it
has() {
    case "$ANSWER" in
    *"$1"*) ;;
    *) fail "the answer has no $1" ;;
    esac
}

# field NAME: the first field of that name in the last answer, a text or a number
field() {
    printf '%s' "$ANSWER" | grep -oE "\"$1\":(\"[^\"]*\"|[0-9]+)" | head -n 1 | sed -E 's/^"[^"]*"://; s/"//g'
}

echo "1. Two topics, and a group whose dead messages also go to a topic"
call 201 POST /topics "{\"name\": \"$ORDERS\", \"partitions\": 1}"
call 201 POST /topics "{\"name\": \"$STOCK\"}"
call 409 POST /topics "{\"name\": \"$ORDERS\"}"
has '"topic_exists"'
call 201 POST "/topics/$ORDERS/groups" \
    '{"name": "default", "policy": {"dead_letter": "topic", "backoff": {"kind": "constant", "initial": "0s"}}}'

echo "2. Publish one message, then two at once"
call 200 POST /messages "{\"topic\": \"$ORDERS\", \"key\": \"SKU-123\", \"payload\": {\"sku\": \"SKU-123\", \"add\": 100}}"
has '"offset":0'
call 200 POST /messages "{\"topic\": \"$ORDERS\", \"messages\": [{\"payload\": \"second\"}, {\"payload\": 3.0}]}"
has '"offset":2'

echo "3. Receive and acknowledge"
call 200 GET "/messages/$ORDERS/0?visibility_timeout=60s"
has '"payload":{"sku": "SKU-123", "add": 100}'
has '"attempt":1'
call 200 POST /messages/ack "{\"topic\": \"$ORDERS\", \"partition\": 0, \"offset\": 0}"
has '"settled":1'
call 409 POST /messages/ack "{\"topic\": \"$ORDERS\", \"partition\": 0, \"offset\": 0}"
has '"lease_lost"'

echo "4. A failure: tried again, with what happened before in its headers"
call 200 GET "/messages/$ORDERS/0"
call 200 POST /messages/nack \
    "{\"topic\": \"$ORDERS\", \"partition\": 0, \"offset\": 1, \"requeue\": true, \"error\": \"timeout\"}"
call 200 GET "/messages/$ORDERS/0?wait=5s"
has '"payload":"second"'
has '"x-custody-delivery-count":"2"'
has '"x-custody-last-error":"timeout"'
RECEIPT="$(field receipt)"

echo "5. In flight, and more time for it"
call 200 GET "/topics/$ORDERS/inflight"
has '"in_flight_count":1'
call 200 POST /messages/extend-visibility \
    "{\"topic\": \"$ORDERS\", \"partition\": 0, \"offset\": 1, \"timeout_seconds\": 60}"
has '"deadline"'
call 200 POST /messages/extend-visibility "{\"receipt\": \"$RECEIPT\", \"timeout_seconds\": 60}"
has '"deadline"'

echo "6. It cannot be processed: dead at once, and listed"
call 200 POST /messages/nack "{\"receipt\": \"$RECEIPT\", \"requeue\": false, \"error\": \"no such SKU\"}"
has '"dead":[1]'
call 200 GET "/topics/$ORDERS/groups/default/dead"
has '"last_error":"no such SKU"'
call 200 GET "/topics/$ORDERS-dlq"
has '"message_count":1'

echo "7. Replay it: published once, however often it is asked for"
REPLAY="{\"dlq_topic\": \"$ORDERS-dlq\", \"partition\": 0, \"offset\": 0, \"target_topic\": \"$ORDERS\"}"
call 200 POST /messages/dlq/replay "$REPLAY"
has '"duplicate":false'
REPLAYED="$(field offset)"
call 200 POST /messages/dlq/replay "$REPLAY"
has "\"offset\":$REPLAYED,\"duplicate\":true"

echo "8. Everything that is left, in one lease and one ack"
call 200 GET "/messages/$ORDERS?max=10"
LEASE="$(field lease_id)"
call 200 POST /messages/ack "{\"lease_id\": \"$LEASE\"}"
has '"settled":2'

echo "9. An idempotent producer: the repeat adds nothing"
call 200 POST /producers/init "{\"producer_id\": \"$PRODUCER\", \"idempotent\": true}"
EPOCH="$(field epoch)"
ORDER="{\"topic\": \"$ORDERS\", \"producer_id\": \"$PRODUCER\", \"epoch\": $EPOCH, \"sequence\": 0, \"payload\": \"order data\"}"
call 200 POST /messages "$ORDER"
has '"duplicate":false'
FIRST="$(field offset)"
call 200 POST /messages "$ORDER"
has "\"offset\":$FIRST,\"duplicate\":true"

echo "10. A transaction over two topics, with the ack of what caused it"
call 200 GET "/messages/$ORDERS"
LEASE="$(field lease_id)"
call 200 POST /transactions/begin "{\"producer_id\": \"$PRODUCER\"}"
TRANSACTION="$(field transaction_id)"
call 202 POST /messages "{\"transaction_id\": \"$TRANSACTION\", \"messages\": [
    {\"topic\": \"$ORDERS\", \"payload\": \"order1\"}, {\"topic\": \"$STOCK\", \"payload\": \"reserve1\"}]}"
call 204 POST /transactions/ack "{\"transaction_id\": \"$TRANSACTION\", \"lease_id\": \"$LEASE\"}"
call 200 GET "/messages/$STOCK"
has '"messages":[]'
call 200 POST /transactions/commit "{\"transaction_id\": \"$TRANSACTION\"}"
call 200 GET "/messages/$STOCK?wait=5s"
has '"payload":"reserve1"'

echo "11. At most once: done when it is sent"
call 200 GET "/messages/$ORDERS?auto_ack=true"
has '"payload":"order1"'
call 200 GET "/topics/$ORDERS/groups/default/stats"
has '"depth":0'

echo "Everything was as it should be."
