//! A session in a file: its tokens, and the rows of its buffers.
//!
//! All numbers are little-endian: `GEMMA4SN`, version (u32), id of the program (32 bytes), number
//! of tokens (u32), position after the last one written (u32), number of buffers (u32); the tokens
//! (u32 each); for each buffer, in the program's order, its rows (u32), the bytes of one row (u32)
//! and the rows; BLAKE3 of all that (32 bytes). Rows that were never written are left out.

use std::io::{self, Read, Write};

use gemma4_format::{Buffer, Extents};

use super::{Next, Session};
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"GEMMA4SN";
const VERSION: u32 = 1;

impl Session {
    /// Writes what is in the context, for [`Session::restore`].
    ///
    /// Fails with [`Error::SavedSession`] if it can't be written, with [`Error::Device`] if the
    /// device can't copy its buffers.
    pub fn save(&mut self, out: &mut dyn Write) -> Result<()> {
        let mut out = Hashed { inner: out, hasher: blake3::Hasher::new() };
        let id = *self.program.file().id();
        let counts = self.saved_rows(self.context, self.written);
        let head = [VERSION.to_le_bytes().as_slice(), &id].concat();
        let numbers = [self.tokens.len() as u32, self.written, counts.len() as u32];
        let tokens = numbers.iter().chain(&self.tokens);
        let tokens: Vec<u8> = tokens.flat_map(|number| number.to_le_bytes()).collect();
        for bytes in [&MAGIC[..], &head, &tokens] {
            out.write_all(bytes).map_err(unwritable)?;
        }
        for (buffer, rows) in counts.into_iter().enumerate() {
            let bytes = self.device.read_buffer(buffer as u32, rows)?;
            let row = bytes.len() as u32 / rows.max(1);
            for bytes in [&rows.to_le_bytes()[..], &row.to_le_bytes(), &bytes] {
                out.write_all(bytes).map_err(unwritable)?;
            }
        }
        let Hashed { inner, hasher } = out;
        inner.write_all(hasher.finalize().as_bytes()).map_err(unwritable)?;
        inner.flush().map_err(unwritable)
    }

    /// Reads what [`Session::save`] wrote, in place of what is in the context. Nothing can be
    /// generated before more tokens are read, or read again ([`Session::reuse`]).
    ///
    /// Fails with [`Error::SavedSession`] if it is from another program, does not fit or is
    /// damaged; the context is then empty.
    pub fn restore(&mut self, input: &mut dyn Read) -> Result<()> {
        self.reset();
        let restored = self.read_saved(input);
        if restored.is_err() {
            self.reset();
        }
        restored
    }

    fn read_saved(&mut self, input: &mut dyn Read) -> Result<()> {
        let mut input = Hashed { inner: input, hasher: blake3::Hasher::new() };
        if input.bytes(8)? != MAGIC {
            return Err(refused("it is no saved session"));
        }
        let version = input.number()?;
        if version != VERSION {
            return Err(refused(format!("version {version} is not {VERSION}")));
        }
        if input.bytes(32)? != *self.program.file().id() {
            return Err(refused("it was saved with another program"));
        }
        let [tokens, written, buffers] = [input.number()?, input.number()?, input.number()?];
        if tokens > written || written > self.context {
            let context = self.context;
            return Err(refused(format!(
                "{tokens} tokens, {written} positions written, and a context of {context}"
            )));
        }
        let bytes = input.bytes(tokens as usize * 4)?;
        let tokens: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        self.check_tokens(&tokens)?;
        let counts = self.saved_rows(self.context, written);
        if buffers as usize != counts.len() {
            return Err(refused(format!("{buffers} buffers instead of {}", counts.len())));
        }
        for (buffer, expected) in counts.into_iter().enumerate() {
            let [rows, row] = [input.number()?, input.number()?];
            let wanted = self.device.read_buffer(buffer as u32, expected.min(1))?.len();
            if rows != expected || row as usize != wanted {
                return Err(refused(format!(
                    "buffer {buffer} has {rows} rows of {row} bytes instead of {expected} of \
                     {wanted}; it may have been saved with another --max_context"
                )));
            }
            let bytes = input.bytes(rows as usize * wanted)?;
            self.device.write_buffer(buffer as u32, &bytes)?;
        }
        let found = input.hasher.finalize();
        let mut expected = [0; 32];
        input.inner.read_exact(&mut expected).map_err(unreadable)?;
        if *found.as_bytes() != expected || input.inner.read(&mut [0]).map_err(unreadable)? != 0 {
            return Err(refused("its checksum does not agree"));
        }
        (self.tokens, self.written, self.next) = (tokens, written, Next::Nothing);
        Ok(())
    }

    /// Rows of each buffer that hold something.
    fn saved_rows(&self, context: u32, written: u32) -> Vec<u32> {
        let rows = |buffer: &Buffer| {
            let rows = buffer.dims.first().map(|dim| dim.resolve(Extents { rows: 1, context }));
            rows.map_or(0, |rows| rows.min(written))
        };
        self.program.program().buffers.iter().map(rows).collect()
    }
}

/// Bytes on their way, hashed.
struct Hashed<T> {
    inner: T,
    hasher: blake3::Hasher,
}

impl Hashed<&mut dyn Write> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.inner.write_all(bytes)
    }
}

impl Hashed<&mut dyn Read> {
    /// So many bytes; no memory is taken for bytes that are not there.
    fn bytes(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut *self.inner).take(count as u64).read_to_end(&mut bytes);
        if read.map_err(unreadable)? != count {
            return Err(refused("it ends too early"));
        }
        self.hasher.update(&bytes);
        Ok(bytes)
    }

    fn number(&mut self) -> Result<u32> {
        let bytes = self.bytes(4)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }
}

fn refused(why: impl Into<String>) -> Error {
    Error::SavedSession { why: why.into() }
}

fn unreadable(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => refused("it ends too early"),
        _ => refused(format!("it can't be read: {error}")),
    }
}

fn unwritable(error: io::Error) -> Error {
    refused(format!("it can't be written: {error}"))
}
