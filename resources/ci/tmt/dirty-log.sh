#!/bin/sh
# $VELLUM is the program, if it is not in the PATH. $VELLUM_ARGUMENTS makes the test shorter or
# longer.
"${VELLUM:-vellum}" test dirty-log ${VELLUM_ARGUMENTS:---duration 10m} --format ktap --exit kselftest --heartbeat 30s
case $? in
    0) result=pass ;;
    4) result=skip ;;
    *) result=fail ;;
esac
printf -- '- name: /\n  result: %s\n' "$result" > "$TMT_TEST_DATA/results.yaml"
