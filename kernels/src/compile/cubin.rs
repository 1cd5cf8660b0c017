//! Reading what a kernel takes of a multiprocessor from a cubin, which is a 64-bit ELF file.

/// What one kernel takes of a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Function.
    pub symbol: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spilled registers and arrays that are indexed by
    /// variables. Zero in every kernel that is meant to be fast.
    pub local: u32,
    /// Bytes of shared memory of a block that are fixed at compile time.
    pub shared: u32,
}

const SYMBOL_TABLE: u32 = 2;
/// Attributes of `.nv.info`, as `cuobjdump --dump-elf` names them.
const EIATTR_FRAME_SIZE: u8 = 0x11;
const EIATTR_REGCOUNT: u8 = 0x2f;
/// The record has a payload, whose length stands in its header.
const EIFMT_SVAL: u8 = 0x04;

struct Section<'a> {
    name: &'a str,
    kind: u32,
    /// Index of the section that this one refers to.
    link: u32,
    size: u64,
    data: &'a [u8],
}

/// The resources of every kernel in `cubin`, in order of name.
pub(super) fn resources(cubin: &[u8]) -> Result<Vec<Resources>, &'static str> {
    let sections = sections(cubin).ok_or("section table")?;
    let symbols = symbols(&sections).ok_or("symbol table")?;
    let mut found: Vec<Resources> = sections
        .iter()
        .filter_map(|section| section.name.strip_prefix(".text."))
        .map(|symbol| Resources {
            symbol: symbol.to_owned(),
            registers: 0,
            local: 0,
            shared: sections
                .iter()
                .find(|s| s.name.strip_prefix(".nv.shared.") == Some(symbol))
                .map_or(0, |s| s.size as u32),
        })
        .collect();
    found.sort_by(|a, b| a.symbol.cmp(&b.symbol));
    let info = sections.iter().find(|s| s.name == ".nv.info").ok_or("no .nv.info section")?;
    let mut rest = info.data;
    while let [format, attribute, low, high, tail @ ..] = rest {
        let payload = match *format {
            EIFMT_SVAL => usize::from(u16::from_le_bytes([*low, *high])),
            _ => 0,
        };
        let record = tail.get(..payload).ok_or("truncated .nv.info section")?;
        rest = &tail[payload..];
        let (Some(symbol), Some(value)) = (u32_at(record, 0), u32_at(record, 4)) else { continue };
        let Some(name) = symbols.get(symbol as usize) else { continue };
        let Some(kernel) = found.iter_mut().find(|kernel| kernel.symbol == *name) else { continue };
        match *attribute {
            EIATTR_FRAME_SIZE => kernel.local = value,
            EIATTR_REGCOUNT => kernel.registers = value,
            _ => {}
        }
    }
    Ok(found)
}

fn sections(elf: &[u8]) -> Option<Vec<Section<'_>>> {
    if elf.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let table = usize::try_from(u64_at(elf, 0x28)?).ok()?;
    let entry = usize::from(u16_at(elf, 0x3a)?);
    let count = usize::from(u16_at(elf, 0x3c)?);
    let names = usize::from(u16_at(elf, 0x3e)?);
    let header = |index: usize| elf.get(table.checked_add(index.checked_mul(entry)?)?..);
    let data = |header: &[u8]| {
        // Sections without contents in the file (`.nv.shared`) have a size all the same.
        if u32_at(header, 4)? == 8 {
            return Some(&elf[..0]);
        }
        let start = usize::try_from(u64_at(header, 0x18)?).ok()?;
        let size = usize::try_from(u64_at(header, 0x20)?).ok()?;
        elf.get(start..start.checked_add(size)?)
    };
    let strings = data(header(names)?)?;
    (0..count)
        .map(|index| {
            let header = header(index)?;
            Some(Section {
                name: string_at(strings, u32_at(header, 0)?)?,
                kind: u32_at(header, 4)?,
                link: u32_at(header, 0x28)?,
                size: u64_at(header, 0x20)?,
                data: data(header)?,
            })
        })
        .collect()
}

fn symbols<'a>(sections: &[Section<'a>]) -> Option<Vec<&'a str>> {
    let table = sections.iter().find(|section| section.kind == SYMBOL_TABLE)?;
    let strings = sections.get(table.link as usize)?.data;
    table.data.chunks_exact(24).map(|symbol| string_at(strings, u32_at(symbol, 0)?)).collect()
}

fn string_at(strings: &[u8], offset: u32) -> Option<&str> {
    let rest = strings.get(offset as usize..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
