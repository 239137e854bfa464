//! The lines of the protocol, read and written.

use std::io::{self, BufRead, Read, Write};

use crate::{Event, MAX_REQUEST};

/// A line, or enough of it to see that it is too long; None at EOF.
pub fn line(input: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    input.take(MAX_REQUEST as u64 + 1).read_until(b'\n', &mut line)?;
    Ok((!line.is_empty()).then_some(line))
}

/// Writes one event.
pub fn tell(output: &mut impl Write, event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}
